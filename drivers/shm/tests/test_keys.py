"""Keys with lesser rights and their revocation, at the driver's function table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import driver_table as table
import pytest
from driver_table import READ, REFUSED, WRITE, Endpoint, Failed, Op

NBYTES = 4 << 20
REGION, KEY = 7, bytes(range(16))
READER, WRITER = b"r" * 16, b"w" * 16


class Reached:
    """An endpoint of this process that owns a region, and one that reaches it with a key."""

    def __init__(self, shareable: bool) -> None:
        self.owner, self.user = Endpoint(), Endpoint()
        self.region, self.memory = self.owner.allocate(NBYTES, REGION, KEY, shareable=shareable)
        self.local, self.bytes = self.user.allocate(NBYTES, 1, b"l" * 16)
        self.connection = self.user.connect(self.owner.address())

    def op(self, opcode: int, key: bytes, length: int = 4096, offset: int = 0) -> Op:
        remote = self.user.import_key(self.connection, REGION, key, NBYTES)
        return Op(
            opcode=opcode,
            connection=self.connection,
            local=self.local,
            remote=remote,
            remote_offset=offset,
            length=length,
        )

    def run(self, opcode: int, key: bytes, length: int = 4096, offset: int = 0) -> tuple[int, str]:
        (result,) = self.user.run([self.op(opcode, key, length, offset)])
        return result

    def close(self) -> None:
        self.memory.release()
        self.bytes.release()
        self.user.close()
        self.owner.close()


@pytest.fixture
def reached(request: pytest.FixtureRequest) -> Iterator[Reached]:
    reached = Reached(getattr(request, "param", True))
    yield reached
    reached.close()


both = pytest.mark.parametrize("reached", [True, False], indirect=True, ids=["memfd", "process_vm"])


@both
@pytest.mark.parametrize("length", [64, NBYTES])
def test_a_reading_key_reads_and_writes_nothing(reached: Reached, length: int) -> None:
    reached.owner.grant(reached.region, READER, table.MAY_READ)
    reached.memory[:] = b"\7" * NBYTES
    assert reached.run(READ, READER, length) == (table.OK, "")
    assert reached.bytes[length - 1] == 7
    reached.bytes[:] = b"\1" * NBYTES
    status, reason = reached.run(WRITE, READER, length)
    assert (status, reason) == (REFUSED, "the key allows only reading from the region")
    assert set(reached.memory.tolist()) == {7}


@both
@pytest.mark.parametrize("length", [64, NBYTES])
def test_a_writing_key_writes_and_reads_nothing(reached: Reached, length: int) -> None:
    reached.owner.grant(reached.region, WRITER, table.MAY_WRITE)
    reached.bytes[:] = b"\1" * NBYTES
    assert reached.run(WRITE, WRITER, length) == (table.OK, "")
    assert reached.memory[length - 1] == 1
    assert reached.run(READ, WRITER, length)[0] == REFUSED


def test_who_may_only_read_gets_a_mapping_and_a_descriptor_that_cannot_write(reached: Reached) -> None:
    def mappings() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.split()[1] for line in lines if "memfd:driver-table" in line]

    reached.owner.grant(reached.region, READER, table.MAY_READ)
    before = mappings()
    assert reached.run(READ, READER) == (table.OK, "")
    added = mappings()
    for kind in before:
        added.remove(kind)
    assert added == ["r--s"]


def test_a_revoked_key_is_refused_and_others_go_on(reached: Reached) -> None:
    reached.owner.grant(reached.region, READER, table.MAY_READ)
    kept, ended = reached.op(READ, KEY), reached.op(READ, READER)
    assert [status for status, _ in reached.user.run([kept, ended])] == [table.OK, table.OK]
    reached.owner.revoke(reached.region, READER, table.deadline_ns(10))
    for length in (64, NBYTES):  # on the spot, and by the copy threads
        kept.length = ended.length = length
        (well, _), (status, reason) = reached.user.run([kept, ended])
        assert (well, status) == (table.OK, REFUSED)
        assert "revoked" in reason
    status, reason = reached.run(READ, READER)  # named anew
    assert (status, "revoked" in reason) == (REFUSED, True)


def test_revoking_every_key_leaves_the_owners_own_operations_alone(reached: Reached) -> None:
    there, _ = reached.user.allocate(NBYTES, 8, b"t" * 16)
    back = reached.owner.connect(reached.user.address())
    away = Op(
        opcode=WRITE,
        connection=back,
        local=reached.region,
        remote=reached.owner.import_key(back, 8, b"t" * 16, NBYTES),
        length=NBYTES,
    )
    assert reached.run(READ, KEY)[0] == table.OK
    reached.owner.revoke(reached.region, None, table.deadline_ns(10))
    assert reached.run(READ, KEY)[0] == REFUSED
    assert reached.owner.run([away]) == [(table.OK, "")]
    assert there


def test_a_key_granted_after_all_were_revoked_is_good(reached: Reached) -> None:
    reached.owner.revoke(reached.region, None)
    reached.owner.grant(reached.region, WRITER, table.MAY_READ | table.MAY_WRITE)
    assert reached.run(READ, WRITER)[0] == table.OK
    assert reached.run(READ, KEY)[0] == REFUSED


def test_a_key_that_was_never_granted_cannot_be_revoked(reached: Reached) -> None:
    with pytest.raises(Failed, match="never had this key") as failure:
        reached.owner.revoke(reached.region, READER)
    assert failure.value.code == table.INVALID


@pytest.mark.parametrize(("key", "access"), [(KEY, 1), (READER, 0), (READER, 4)])
def test_a_key_of_no_use_is_not_granted(reached: Reached, key: bytes, access: int) -> None:
    with pytest.raises(Failed) as failure:
        reached.owner.grant(reached.region, key, access)
    assert failure.value.code == table.INVALID


def test_revoking_with_deadline_0_does_not_wait(reached: Reached) -> None:
    running = [reached.op(WRITE, KEY, NBYTES) for _ in range(32)]
    reached.user.submit(running)
    started = time.monotonic()
    reached.owner.revoke(reached.region, None)
    assert time.monotonic() - started < 5
    finished = reached.user.finish(len(running))
    assert {item.status for item in finished} <= {table.OK, REFUSED}


@pytest.mark.parametrize("length", [64, NBYTES])
def test_one_byte_beyond_the_region_is_refused(reached: Reached, length: int) -> None:
    status, reason = reached.run(WRITE, KEY, length, NBYTES - length + 1)
    assert (status, reason) == (REFUSED, f"the range is outside the region, which has {NBYTES} bytes")


def test_a_wrong_key_is_refused(reached: Reached) -> None:
    assert reached.run(READ, READER) == (REFUSED, f"wrong access key for region {REGION}")


def test_three_hundred_keys_come_and_go(reached: Reached) -> None:
    for number in range(300):
        key = number.to_bytes(16, "little")
        if key == KEY:
            continue
        reached.owner.grant(reached.region, key, table.MAY_READ)
        assert reached.run(READ, key)[0] == table.OK
        reached.owner.revoke(reached.region, key)
        assert reached.run(READ, key)[0] == REFUSED
