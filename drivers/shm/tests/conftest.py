"""Engines that know no driver but shm, and peers in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_transfer import TransferConfig, TransferEngine

NBYTES = 4 << 20


class PeerProcess:
    """A process that owns one region; see peer_process.py."""

    def __init__(self, kind: str, nbytes: int, uid: int, options: dict[str, Any]) -> None:
        script = Path(__file__).with_name("peer_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), kind, str(nbytes), str(uid), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str) -> Any:
        """Send one command and return its answer. The test's own time limit bounds the wait."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the peer ended with {self.process.wait(10)} instead of answering {command!r}"
        return json.loads(answer)

    @property
    def descriptor(self) -> bytes:
        """The descriptor of its region."""
        return bytes.fromhex(self.ask("describe"))

    def kill(self) -> None:
        """End it by SIGKILL, and see that it has ended."""
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        """Let it end by itself, if it still runs."""
        try:
            self.process.communicate(timeout=20)
        finally:
            self.kill()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    """An engine of this process."""
    with TransferEngine(TransferConfig(drivers=("shm",))) as engine:
        yield engine


@pytest.fixture
def start_peer() -> Iterator[Callable[..., PeerProcess]]:
    """Start peers; they end with the test."""
    peers: list[PeerProcess] = []

    def start(
        kind: str = "allocated", nbytes: int = NBYTES, uid: int | None = None, **options: Any
    ) -> PeerProcess:
        peers.append(PeerProcess(kind, nbytes, os.getuid() if uid is None else uid, options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()
