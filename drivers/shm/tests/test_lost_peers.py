"""Peers that are killed, stopped, restarted or in another namespace, at the driver's function table."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_table import OK, READ, REFUSED, UNREACHABLE, UNSUPPORTED, WRITE, Endpoint, Failed, Op

from mooncake_transfer.testing.stopping import stopped_process

NBYTES = 16 << 20
REGION, KEY = 7, bytes(range(16))
StartProcess = Callable[..., Any]
both_kinds = pytest.mark.parametrize("shareable", [True, False], ids=["memfd", "process_vm"])


class Reacher:
    """An endpoint that reaches regions of processes."""

    def __init__(self, **options: object) -> None:
        self.endpoint = Endpoint(**options)
        self.local, self.bytes = self.endpoint.allocate(NBYTES, 1, b"l" * 16)

    def reach(self, process: Any) -> dict[str, int]:
        connection = self.endpoint.connect(process.address)
        remote = self.endpoint.import_key(connection, REGION, KEY, process.nbytes)
        return {"connection": connection, "local": self.local, "remote": remote}

    def run(self, names: dict[str, int], opcode: int = READ, length: int = 64) -> tuple[int, str]:
        (result,) = self.endpoint.run([Op(opcode=opcode, length=length, **names)])
        return result

    def close(self) -> None:
        self.bytes.release()
        self.endpoint.close()


@pytest.fixture
def reacher() -> Iterator[Reacher]:
    reacher = Reacher(answer_timeout_s=3.0)
    yield reacher
    reacher.close()


@both_kinds
def test_a_connection_comes_back_after_its_peer_was_stopped_for_too_long(
    reacher: Reacher, endpoint_process: StartProcess, shareable: bool
) -> None:
    process = endpoint_process(NBYTES, shareable=shareable)
    names = reacher.reach(process)
    assert reacher.run(names) == (OK, "")
    with stopped_process(process.pid):
        asking = dict(names, remote=reacher.endpoint.import_key(names["connection"], 8, KEY, NBYTES))
        status, reason = reacher.run(asking)
        assert (status, "did not answer in time" in reason) == (UNREACHABLE, True)
        status, reason = reacher.run(names)  # a new attempt, which nobody answers either
        assert (status, "did not answer the hello" in reason) == (UNREACHABLE, True)
    for length in (64, NBYTES):
        assert reacher.run(names, length=length) == (OK, "")
    assert reacher.run(asking) == (REFUSED, "region 8 is not registered at the target")


def test_what_was_mapped_is_read_while_its_owner_is_stopped(
    reacher: Reacher, endpoint_process: StartProcess
) -> None:
    process = endpoint_process(NBYTES)
    names = reacher.reach(process)
    assert process.do("fill 9") == "done"
    assert reacher.run(names)[0] == OK
    with stopped_process(process.pid):
        assert reacher.run(names, length=NBYTES) == (OK, "")
    assert reacher.bytes[NBYTES - 1] == 9


@both_kinds
def test_operations_in_flight_end_when_the_target_is_killed(
    reacher: Reacher, endpoint_process: StartProcess, shareable: bool
) -> None:
    process = endpoint_process(NBYTES, shareable=shareable)
    names = reacher.reach(process)
    assert reacher.run(names, WRITE, NBYTES)[0] == OK
    count = 64
    reacher.endpoint.submit([Op(opcode=WRITE, length=NBYTES, cookie=i, **names) for i in range(count)])
    process.end()
    finished = reacher.endpoint.finish(count)
    assert {item.status for item in finished} <= {OK, UNREACHABLE}
    for length in (1, 64, NBYTES):  # its mapping is still there, but nobody is behind it
        assert reacher.run(names, WRITE, length)[0] == UNREACHABLE


def test_a_process_that_takes_the_place_of_a_dead_one_is_never_written_to(
    reacher: Reacher, endpoint_process: StartProcess
) -> None:
    first = endpoint_process(NBYTES)
    names = reacher.reach(first)
    assert reacher.run(names, WRITE)[0] == OK
    first.end()
    second = endpoint_process(NBYTES)  # the same region id and key
    reacher.bytes[:] = b"\7" * NBYTES
    for length in (64, NBYTES):
        assert reacher.run(names, WRITE, length)[0] == UNREACHABLE
    assert second.do("values") == "0"
    assert reacher.run(reacher.reach(second), WRITE)[0] == OK


def write_for_ever(process: Any, owner: Endpoint, region_id: int) -> None:
    process.tell(f"write-for-ever {owner.address().hex()} {region_id} {KEY.hex()}")
    assert process.line() == "writing"


def test_a_region_is_given_back_although_its_writer_was_killed(endpoint_process: StartProcess) -> None:
    with Endpoint() as owner:
        region, memory = owner.allocate(NBYTES, 3, KEY)
        process = endpoint_process(NBYTES)
        write_for_ever(process, owner, 3)
        process.end()
        owner.deregister(region, 10)
        memory[:] = b"\5" * NBYTES
        assert set(bytes(memory)) == {5}
        memory.release()


def test_a_region_is_given_back_once_its_stopped_writer_goes_on(endpoint_process: StartProcess) -> None:
    with Endpoint() as owner:
        region, memory = owner.allocate(NBYTES, 3, KEY)
        process = endpoint_process(NBYTES)
        write_for_ever(process, owner, 3)
        # Whether the signal catches it inside a copy, so that the call has to give up, is left to chance.
        with stopped_process(process.pid), contextlib.suppress(Failed):
            owner.deregister(region, 0.05)
            region = 0
        if region:
            owner.deregister(region, 10)
        memory[:] = b"\5" * NBYTES
        assert process.line() == "done"  # it was refused
        assert set(bytes(memory)) == {5}
        memory.release()


def test_small_operations_overtake_a_large_one(reacher: Reacher, endpoint_process: StartProcess) -> None:
    names = reacher.reach(endpoint_process(NBYTES))
    assert reacher.run(names)[0] == OK
    large = [Op(opcode=WRITE, length=NBYTES, cookie=1, **names) for _ in range(16)]
    reacher.endpoint.submit(large)
    reacher.endpoint.submit([Op(opcode=READ, length=64, cookie=2, **names)])
    assert 2 in {item.cookie for item in reacher.endpoint.poll()}
    reacher.endpoint.finish(len(large))


def counts() -> tuple[int, int, int]:
    """Descriptors, mappings and threads of this process."""
    own = Path("/proc/self")
    maps = (own / "maps").read_text()
    memfds = maps.count("memfd:mooncake-shm") + maps.count("memfd:driver-table")
    return len(list((own / "fd").iterdir())), memfds, len(list((own / "task").iterdir()))


def test_a_thousand_connections_leave_nothing_behind(
    reacher: Reacher, endpoint_process: StartProcess
) -> None:
    process = endpoint_process(1 << 20)

    def cycle() -> None:
        names = reacher.reach(process)
        assert reacher.run(names)[0] == OK
        reacher.endpoint.disconnect(names["connection"])

    def settled(limit_s: float = 20) -> tuple[int, int, int]:
        deadline, now = time.monotonic() + limit_s, counts()
        while now > before and time.monotonic() < deadline:
            time.sleep(0.01)
            now = counts()
        return now

    before = counts()
    theirs = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    for _ in range(1000):
        cycle()
    assert settled() <= before
    deadline = time.monotonic() + 20
    while len(list(Path(f"/proc/{process.pid}/fd").iterdir())) > theirs and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) <= theirs


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from driver_table import Endpoint, Op
endpoint = Endpoint()
local, memory = endpoint.allocate({nbytes}, 1, b"l" * 16)
connection = endpoint.connect(bytes.fromhex({address!r}))
remote = endpoint.import_key(connection, 7, bytes(range(16)), {nbytes})
names = dict(connection=connection, local=local, remote=remote)
"""


def run_program(process: Any, body: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parent)
    program = PROGRAM.format(tests=tests, nbytes=process.nbytes, address=process.address.hex()) + body
    command = [*before, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_forked_child_takes_no_part_and_its_parent_goes_on(endpoint_process: StartProcess) -> None:
    body = """
import os
from driver_table import CLOSED, Failed
op = Op(opcode=0, length=64, **names)
print(endpoint.run([op]))
child = os.fork()
if child == 0:
    try:
        endpoint.submit([op])
    except Failed as failure:
        os._exit(0 if failure.code == CLOSED else 2)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), endpoint.run([op]))
"""
    done = run_program(endpoint_process(NBYTES), body)
    assert done.stdout.splitlines() == ["[(0, '')]", "0 [(0, '')]"], done.stderr


def test_a_reached_limit_of_descriptors_is_named_and_passes(endpoint_process: StartProcess) -> None:
    body = """
import os, resource, time
used = [os.open("/dev/null", os.O_RDONLY)]
resource.setrlimit(resource.RLIMIT_NOFILE, (used[0] + 8, used[0] + 8))
while True:
    try:
        used.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
other = endpoint.connect(bytes.fromhex({address!r}))
names = dict(connection=other, local=local, remote=endpoint.import_key(other, 7, bytes(range(16)), {nbytes}))
print(endpoint.run([Op(opcode=0, length=64, **names)]))
for descriptor in used:
    os.close(descriptor)
limit = time.monotonic() + 20
while (result := endpoint.run([Op(opcode=0, length=64, **names)])) != [(0, "")]:
    assert time.monotonic() < limit, result
"""
    process = endpoint_process(NBYTES)
    done = run_program(process, body.format(address=process.address.hex(), nbytes=NBYTES))
    assert done.returncode == 0, done.stderr
    assert "Too many open files" in done.stdout or "limit of open files" in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_foreign_memory_that_the_kernel_protects_is_refused_with_the_reason(
    endpoint_process: StartProcess,
) -> None:
    process = endpoint_process(NBYTES, shareable=False, allow_other_users=True)
    body = f"""
import os
os.setgid(65534)
os.setuid(65534)
from driver_table import Endpoint
other = Endpoint(allow_other_users=True)
local, memory = other.allocate({NBYTES}, 1, b"l" * 16)
connection = other.connect(bytes.fromhex({process.address.hex()!r}))
remote = other.import_key(connection, 7, bytes(range(16)), {NBYTES})
print(other.run([Op(opcode=0, connection=connection, local=local, remote=remote, length=64)])[0])
"""
    done = run_program(process, body)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"({UNSUPPORTED}, ")
    assert "EPERM" in done.stdout


def unshare(*kinds: str) -> tuple[str, ...]:
    """A command that runs another in namespaces of its own. Skips where the machine forbids them."""
    command = ("unshare", *kinds)
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("the program `unshare` is not installed")
    if tried.returncode != 0:
        pytest.skip(f"this machine does not allow `{' '.join(command)}`: {tried.stderr.strip()}")
    return command


def test_a_peer_in_another_network_namespace_is_unreachable_with_that_reason(
    reacher: Reacher, endpoint_process: StartProcess
) -> None:
    process = endpoint_process(NBYTES, before=unshare("--net"))
    with pytest.raises(Failed, match="another network namespace") as failure:
        reacher.reach(process)
    assert failure.value.code == UNREACHABLE


@pytest.mark.parametrize("kinds", [("--ipc",), ("--pid", "--fork", "--kill-child"), ("--uts", "--mount")])
def test_allocated_memory_is_shared_with_a_peer_in_other_namespaces(
    reacher: Reacher, endpoint_process: StartProcess, kinds: tuple[str, ...]
) -> None:
    process = endpoint_process(NBYTES, before=unshare(*kinds))
    names = reacher.reach(process)
    assert process.do("fill 6") == "done"
    for length in (64, NBYTES):
        assert reacher.run(names, length=length) == (OK, "")
    assert reacher.bytes[NBYTES - 1] == 6


def test_foreign_memory_of_a_peer_that_is_not_visible_is_refused_with_the_reason(
    endpoint_process: StartProcess,
) -> None:
    process = endpoint_process(NBYTES, shareable=False)
    body = "print(endpoint.run([Op(opcode=0, length=64, **names)])[0])"
    done = run_program(process, body, unshare("--pid", "--fork", "--kill-child"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"({UNSUPPORTED}, ")
    assert "not visible from this pid namespace" in done.stdout
