"""An engine that knows no driver but shm, and peers in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.testing import PeerProcess

# Tests and the processes that they start share driver_table.py.
sys.path.insert(0, str(Path(__file__).parent))

CONFIG = TransferConfig(drivers=("shm",))


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    """An engine of this process."""
    with TransferEngine(CONFIG) as engine:
        yield engine


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    """A process of the test's own."""
    with PeerProcess(CONFIG) as peer:
        yield peer


@pytest.fixture
def region_of_another_user() -> Iterator[Callable[..., bytes]]:
    """Start a process of a user that owns ``nbytes`` of 7s; return the descriptor. It ends with the test."""
    script = Path(__file__).with_name("process_of_another_user.py")

    with ExitStack() as stack:

        def start(uid: int, nbytes: int, **options: Any) -> bytes:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), str(uid), str(nbytes), json.dumps(options)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            assert process.stdout is not None
            return bytes.fromhex(process.stdout.readline())

        yield start


class EndpointProcess:
    """A process that owns a region of the driver, without an engine; see endpoint_process.py."""

    def __init__(self, nbytes: int, shareable: bool, before: Sequence[str], options: dict[str, Any]) -> None:
        script = Path(__file__).with_name("endpoint_process.py")
        arguments = [
            str(nbytes),
            str(int(shareable)),
            *(f"{name}={value}" for name, value in options.items()),
        ]
        self.process = subprocess.Popen(
            [*before, sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.nbytes = nbytes
        self.address = bytes.fromhex(self.line())

    @property
    def pid(self) -> int:
        """Its process id (that of the command before it, where there is one)."""
        return self.process.pid

    def line(self) -> str:
        """The next line that it writes."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, command: str) -> None:
        """Give a command and do not wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def do(self, command: str) -> str:
        """Give a command and return the answer."""
        self.tell(command)
        return self.line()

    def end(self) -> None:
        """Kill it, as by kill -9, and wait for its end."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def endpoint_process() -> Iterator[Callable[..., EndpointProcess]]:
    """Start processes that own a region; they end with the test."""
    with ExitStack() as stack:

        def start(
            nbytes: int, *, shareable: bool = True, before: Sequence[str] = (), **options: Any
        ) -> EndpointProcess:
            process = EndpointProcess(nbytes, shareable, before, options)
            stack.callback(process.end)
            return process

        yield start
