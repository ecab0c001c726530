"""Forks ranks for tests from a process that has imported torch once and has no threads.

Each line of standard input is one launch, {"file", "function", "ranks", "world", "folder", "arguments",
"place"}; "place" is null, "apart" for ranks that take each other for ranks of other hosts, or the network
namespace of each rank;
the answer is a line with the process numbers. A rank calls `function(rank, world, folder, **arguments)` of
the file and leaves what it returns in `folder/RANK.json`, or its traceback in `folder/RANK.failed`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import mooncake_ep.pg  # noqa: F401 - registers the backend
from mooncake_ep.pg import bootstrap

CLONE_NEWNET = 0x40000000


def go_to(place: Any, rank: int) -> None:
    """Enter the namespace of a rank, or pretend that it has a host of its own."""
    if place == "apart":
        bootstrap.host_name = lambda: f"host-{rank}"
    elif place:
        with open(f"/run/netns/{place[rank]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {place[rank]}")


def run(launch: dict[str, Any], rank: int) -> None:
    folder = Path(launch["folder"])
    torch.set_num_threads(1)
    try:
        go_to(launch["place"], rank)
        spec = importlib.util.spec_from_file_location("launched", launch["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = getattr(module, launch["function"])(rank, launch["world"], folder, **launch["arguments"])
        leave(folder / f"{rank}.json", json.dumps(result))
    except BaseException:
        leave(folder / f"{rank}.failed", traceback.format_exc())


def leave(file: Path, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.rename(file)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        launch = json.loads(line)
        pids = []
        for rank in launch["ranks"]:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                run(launch, rank)
                os._exit(0)
            pids.append(pid)
        sys.stdout.write(json.dumps(pids) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
