"""An engine that knows no driver but shm, and peers in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.testing import PeerProcess

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
