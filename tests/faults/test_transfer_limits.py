"""What is used up comes back, and running out of it is an error, not the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.testing import PeerProcess
from mooncake_transfer.testing.fixtures import wait_until

NBYTES = 64 << 10
DEADLINE_S = 20.0
ALL = [[0, 0, NBYTES]]
GROWTH_BYTES = 2 << 20  # a leak of a few KiB per cycle would be more; pools of memory that settle are less

drivers = pytest.mark.parametrize("driver", ["tcp", "shm"])


class Usage:
    """What a process holds: descriptors, threads, memory."""

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self.before = self.now()

    def now(self) -> tuple[int, int, int]:
        return self.process.num_fds(), self.process.num_threads(), self.process.memory_info().rss

    def check_is_back(self) -> None:
        def is_back() -> bool:
            fds, threads, memory = self.now()
            return (
                fds <= self.before[0] and threads <= self.before[1] and memory < self.before[2] + GROWTH_BYTES
            )

        wait_until(is_back, f"it holds what it held before, {self.before}, not {self.now()}")


def repeat(cycle: Callable[[], None], times: int, pid: int) -> None:
    """Run a cycle until caches are warm, then so many times: this process and the peer hold no more."""
    for _ in range(times // 10):
        cycle()
    here, there = Usage(psutil.Process().pid), Usage(pid)
    for _ in range(times):
        cycle()
    here.check_is_back()
    there.check_is_back()


@drivers
def test_a_thousand_connections_that_come_and_go_leave_nothing(driver: str) -> None:
    config = TransferConfig(drivers=(driver,))
    with PeerProcess(config) as peer, TransferEngine(config) as engine:
        owned = peer.allocate(NBYTES, 1)
        local = engine.allocate(NBYTES)

        def cycle() -> None:
            remote = engine.import_region(owned.descriptor)
            engine.read(local, remote, ALL).wait(DEADLINE_S)
            remote.close()
            remote.peer.close()

        repeat(cycle, 1000, peer.pid)


@drivers
def test_engines_that_come_and_go_leave_nothing(driver: str) -> None:
    config = TransferConfig(drivers=(driver,))
    with PeerProcess(config) as peer:
        owned = peer.allocate(NBYTES, 1)

        def cycle() -> None:
            with TransferEngine(config) as engine:
                local = engine.allocate(NBYTES)
                engine.read(local, engine.import_region(owned.descriptor), ALL).wait(DEADLINE_S)

        repeat(cycle, 100, peer.pid)


@drivers
def test_a_thousand_regions_that_come_and_go_leave_nothing(driver: str) -> None:
    config = TransferConfig(drivers=(driver,))
    with PeerProcess(config) as peer, TransferEngine(config) as engine:
        owned = peer.allocate(NBYTES, 1)

        def cycle() -> None:
            local = engine.allocate(NBYTES)
            engine.write(local, engine.import_region(owned.descriptor), ALL).wait(DEADLINE_S)
            local.close(DEADLINE_S)

        repeat(cycle, 1000, peer.pid)


SCRIPT = """
import resource, sys
from pathlib import Path
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError

driver = sys.argv[1]
nbytes = 1 << 16
config = TransferConfig(drivers=(driver,), connect_timeout_s=2.0)
held = lambda: len(list(Path("/proc/self/fd").iterdir()))
owner, user = TransferEngine(config), TransferEngine(config)
source, place = owner.allocate(nbytes), user.allocate(nbytes)
source.view()[:] = b"x" * nbytes
remote = user.import_region(source.descriptor())
user.read(place, remote, [[0, 0, nbytes]]).wait(20)
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (held() + int(sys.argv[2]), most))

made = []
failures = []
while len(failures) < 3:
    try:
        made.append(TransferEngine(config))
        made.append(made[-1].allocate(nbytes))
        user.import_region(made[-1].descriptor())
    except TransferError as error:
        failures.append(error)
    assert len(made) < 1000
assert all(str(error) for error in failures)

# What stood before stands, while there is nothing left and when there is again.
user.read(place, remote, [[0, 0, nbytes]]).wait(20)
for one in made:
    one.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
made = TransferEngine(config)
again = made.allocate(nbytes)
made.read(again, made.import_region(source.descriptor()), [[0, 0, nbytes]]).wait(20)
assert bytes(again.view()) == b"x" * nbytes
for one in (made, user, owner):
    one.close()
print([type(error).__name__ for error in failures])
"""


STARTING = """
import gc, os, resource, sys, time
from pathlib import Path
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError

driver, name, room = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = TransferConfig(drivers=(driver,))
TransferEngine(config).close()
if name == "RLIMIT_NPROC" and os.geteuid() == 0:  # which has no power over root
    os.setgid(65534)
    os.setuid(65534)
limit = getattr(resource, name)
most = resource.getrlimit(limit)[1]
held = lambda of: len(list(Path(f"/proc/self/{of}").iterdir()))
used = held("task") if name == "RLIMIT_NPROC" else held("fd") - 1  # the folder's own
gc.collect()
gc.disable()  # what an engine leaves goes with it, not some time later
before, failed = (held("fd"), held("task")), []
for left in range(room):
    resource.setrlimit(limit, (used + left, most))
    try:
        TransferEngine(config).close()
    except TransferError as error:
        failed.append(str(error))
    resource.setrlimit(limit, (most, most))  # to look needs a descriptor, too
    until_s = time.monotonic() + 20
    while (now := (held("fd"), held("task"))) != before:  # a thread shows a moment longer
        assert time.monotonic() < until_s, (left, before, now, failed[-1:])
        time.sleep(0.01)
print(*failed, sep="\\n")
"""


@drivers
@pytest.mark.parametrize(
    ("limit", "room", "remedy"), [("RLIMIT_NOFILE", 30, "ulimit -n"), ("RLIMIT_NPROC", 16, "ulimit -u")]
)
def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(
    driver: str, limit: str, room: int, remedy: str
) -> None:
    """Wherever in its start the threads or descriptors run out."""
    ended = subprocess.run(
        [sys.executable, "-c", STARTING, driver, limit, str(room)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert remedy in ended.stdout


@drivers
@pytest.mark.parametrize("left", [3, 14, 40])
def test_running_out_of_descriptors_fails_what_needs_one(driver: str, left: int) -> None:
    """With a typed error; all that stands goes on, and when some are free again, so does the rest."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, driver, str(left)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Error" in ended.stdout or "Unavailable" in ended.stdout or "Unreachable" in ended.stdout
