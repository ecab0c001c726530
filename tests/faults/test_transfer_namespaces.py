"""Peers in other namespaces, as in containers: what shm cannot reach goes over tcp, and one line says why."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mooncake_transfer import TransferConfig, TransferEngine

NBYTES = 1 << 20
TIMES = 3

# Reads and writes again and again, and says what went over which driver and what the engine logged.
INITIATOR = """
import json, logging, sys
from collections import Counter
from mooncake_transfer import TransferConfig, TransferEngine

logged = []

class Collector(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())

logging.getLogger("mooncake_transfer").addHandler(Collector(logging.WARNING))
descriptor, nbytes, times = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
moved = Counter()
with TransferEngine(TransferConfig(drivers=("shm", "tcp"))) as engine:
    local = engine.allocate(nbytes)
    remote = engine.import_region(descriptor)
    for number in range(times):
        transfer = engine.read(local, remote, [[0, 0, nbytes]])
        transfer.wait(20)
        moved.update(transfer.bytes_by_driver)
        assert bytes(local.view()) == bytes([number]) * nbytes
        local.view()[:] = bytes([number + 1]) * nbytes
        transfer = engine.write(local, remote, [[0, 0, nbytes]])
        transfer.wait(20)
        moved.update(transfer.bytes_by_driver)
print(json.dumps([moved, logged]))
"""


def unshared(*kinds: str) -> list[str]:
    """A command that runs another in namespaces of its own. Skips where the machine forbids them."""
    command = ["unshare", *kinds]
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("the program `unshare` is not installed")
    if tried.returncode != 0:
        pytest.skip(f"this machine does not allow `{' '.join(command)}`: {tried.stderr.strip()}")
    return command


def moved_and_logged(before: list[str], descriptor: bytes) -> tuple[dict[str, int], list[str]]:
    """Run the initiator after ``before``; return bytes by driver, and the warnings of its engine."""
    command = [*before, sys.executable, "-c", INITIATOR, descriptor.hex(), str(NBYTES), str(TIMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    moved, logged = json.loads(done.stdout)
    return moved, logged


def test_foreign_memory_beyond_a_pid_namespace_goes_over_tcp_with_the_reason_told_once() -> None:
    before = unshared("--pid", "--fork", "--kill-child")
    memory = bytearray(NBYTES)
    with TransferEngine(TransferConfig(drivers=("shm", "tcp"))) as owner, owner.register(memory) as region:
        moved, logged = moved_and_logged(before, region.descriptor())
        assert memory == bytes([TIMES]) * NBYTES
    assert moved == {"tcp": 2 * TIMES * NBYTES}
    (reason,) = logged
    assert "shm" in reason
    assert "not visible from this pid namespace" in reason


def test_allocated_memory_is_shared_beyond_a_pid_namespace() -> None:
    before = unshared("--pid", "--fork", "--kill-child")
    with TransferEngine(TransferConfig(drivers=("shm", "tcp"))) as owner, owner.allocate(NBYTES) as region:
        moved, logged = moved_and_logged(before, region.descriptor())
        assert bytes(region.view()) == bytes([TIMES]) * NBYTES
    assert moved == {"shm": 2 * TIMES * NBYTES}
    assert logged == []
