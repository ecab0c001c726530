"""Ranks in processes of their own."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

LIMIT_S = 200
Work = Callable[[int, dist.ProcessGroup], Any]


class Ranks:
    """Runs a function as every rank of a gloo group, in forked processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups = 0
        self._running: dict[int, int] = {}

    def __call__(self, size: int, work: Work) -> list[Any]:
        """What `work(rank, group)` returned on each rank; None where the rank was killed."""
        self._groups += 1
        place = self._folder / f"group{self._groups}"
        pipes = [self._start(rank, size, place, work) for rank in range(size)]
        deadline = time.monotonic() + LIMIT_S
        results = [self._result(pipe, deadline) for pipe in pipes]
        failures = [f"rank {rank}:\n{told}" for rank, (kind, told) in enumerate(results) if kind == "failed"]
        assert not failures, "\n".join(failures)
        return [told for _, told in results]

    def _start(self, rank: int, size: int, place: Path, work: Work) -> int:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Children use no thread of this process's.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child:
            os.close(writing)
            self._running[child] = reading
            return reading
        os.close(reading)
        _be_rank(rank, size, place, work, writing)
        raise AssertionError("a rank came back")

    def _result(self, pipe: int, deadline: float) -> tuple[str, Any]:
        told = b""
        while True:
            ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return "failed", "did not end"
            part = os.read(pipe, 1 << 16)
            if not part:
                break
            told += part
        return pickle.loads(told) if told else ("killed", None)

    def end(self) -> None:
        """Leave nothing behind."""
        for child, pipe in self._running.items():
            os.close(pipe)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._running.clear()


def _be_rank(rank: int, size: int, place: Path, work: Work, writing: int) -> None:
    result: tuple[str, Any]
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(place), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
        )
        assert dist.group.WORLD is not None
        result = ("done", work(rank, dist.group.WORLD))
    except BaseException:  # the parent says what it was
        result = ("failed", traceback.format_exc())
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(pickle.dumps(result))
    os._exit(0)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Ranks(size, work): run `work(rank, group)` as every rank; what each returned."""
    started = Ranks(tmp_path)
    yield started
    started.end()
