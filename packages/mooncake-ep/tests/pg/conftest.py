"""Ranks in processes of their own, which tests kill and stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 120.0


class Ranks:
    """Processes of one launch. `results()` waits for all but those that the test killed."""

    def __init__(self, folder: Path, ranks: Sequence[int], pids: Sequence[int]) -> None:
        self.folder = folder
        self.pids = dict(zip(ranks, pids, strict=True))

    def wait_for(self, name: str) -> str:
        """Wait until a rank has left a file, and return what is in it."""
        deadline = time.monotonic() + DEADLINE_S
        while not (self.folder / name).exists():
            failed = list(self.folder.glob("*.failed"))
            assert not failed, failed[0].read_text()
            assert time.monotonic() < deadline, f"{name} has not come"
            time.sleep(0.005)
        return (self.folder / name).read_text()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def results(self, ranks: Sequence[int] | None = None) -> list[Any]:
        wanted = list(self.pids) if ranks is None else ranks
        return [json.loads(self.wait_for(f"{rank}.json")) for rank in wanted]

    def gone(self, rank: int) -> None:
        """Wait until the process has ended."""
        deadline = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{self.pids[rank]}").exists():
            assert time.monotonic() < deadline, f"rank {rank} is still there"
            time.sleep(0.005)

    def end(self) -> None:
        for pid in self.pids.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture(scope="session")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("fork_server.py")
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="ranks that churn kills and replaces")


Launch = Callable[..., Ranks]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module at each of its `PLACES`."""
    places = getattr(metafunc.module, "PLACES", None)
    if places and "launch" in metafunc.fixturenames:
        metafunc.parametrize("launch", places, indirect=True, ids=[place or "host" for place in places])


@pytest.fixture
def launch(
    fork_server: subprocess.Popen[str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Launch]:
    """`launch(function, world, ranks=None, **arguments)` calls the function in a process of each rank.

    A parameter of the fixture, or `place`: where ranks are, as fork_server.py says.
    """
    started: list[Ranks] = []
    everywhere = getattr(request, "param", None)

    def start(
        function: Callable[..., Any],
        world: int,
        ranks: Sequence[int] | None = None,
        place: Any = everywhere,
        **arguments: Any,
    ) -> Ranks:
        numbers = list(range(world)) if ranks is None else list(ranks)
        order = {
            "file": function.__code__.co_filename,
            "function": function.__name__,
            "ranks": numbers,
            "world": world,
            "folder": str(tmp_path),
            "arguments": arguments,
            "place": place,
        }
        assert fork_server.stdin is not None
        assert fork_server.stdout is not None
        fork_server.stdin.write(json.dumps(order) + "\n")
        fork_server.stdin.flush()
        ranks_started = Ranks(tmp_path, numbers, json.loads(fork_server.stdout.readline()))
        started.append(ranks_started)
        return ranks_started

    yield start
    for ranks_started in started:
        ranks_started.end()
