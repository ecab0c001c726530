"""A system that has no thread left, and a resolver that does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_transfer.testing.compiling import compiled

HERE = Path(__file__).parent
DEADLINE_S = 60

# Files go through threads, as where io_uring is forbidden. `refuse_threads` comes from no_threads.cpp.
NO_THREADS = """
import ctypes, json, sys
import numpy as np
from mooncake_transfer import RailConfig, TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError
from mooncake_transfer.memory import FileSource

process = ctypes.CDLL(None)
options = {"nvmeof": {"io": "threads", "workers": 2, "chunk_bytes": 4096}}
config = TransferConfig(drivers=("nvmeof",), driver_options=options, rails=RailConfig(attempts=1))
with TransferEngine(config) as engine:
    memory = np.ones(1 << 20, np.uint8)
    local = engine.register(memory)
    place = engine.import_region(engine.register(FileSource(sys.argv[1])).descriptor())
    said = []
    for refused in (True, False, True):
        process.refuse_threads(refused)
        try:
            engine.write(local, place, [[0, 0, memory.nbytes]]).wait(20)
            said.append("")
        except TransferError as error:
            said.append(str(error))
    process.refuse_threads(False)
print(json.dumps(said))
"""

NO_RESOLVER = """
import socket, time
from mooncake_driver_nvmeof._core import identify

# Where resolv.conf sends questions: nobody answers, as when the resolver is cut off.
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
started = time.monotonic()
print(identify("nvme-tcp://nowhere.test/nqn.2024-01.test:one?nsid=1", "nqn.test:host", False, False, 0.5)[1])
print(time.monotonic() - started)
"""


@pytest.fixture(scope="module")
def no_threads() -> Path:
    """The library that is preloaded."""
    return compiled("no_threads.so", [HERE / "no_threads.cpp"], "-O1", "-shared", "-ldl")


def test_without_a_thread_operations_fail_with_the_reason_and_with_one_they_go_on(
    no_threads: Path, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", NO_THREADS, str(path)]
    environment = os.environ | {"LD_PRELOAD": str(no_threads)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    none, some, one = json.loads(done.stdout)
    assert "no thread can be had" in none
    assert "ulimit -u" in none
    assert (some, one) == ("", "")
    assert path.read_bytes() == b"\x01" * (1 << 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process a network of its own")
def test_a_resolver_that_does_not_answer_does_not_outlast_the_deadline() -> None:
    script = (
        "ip link set lo up && mount -t tmpfs none /mnt && echo 'nameserver 127.0.0.1' > /mnt/resolv.conf"
        ' && mount --bind /mnt/resolv.conf /etc/resolv.conf && exec "$@"'
    )
    command = ["unshare", "--net", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", NO_RESOLVER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    text, elapsed = done.stdout.splitlines()
    assert "cannot look up nowhere.test:4420: the resolver" in text
    assert float(elapsed) < 4
