"""Peers that speak the control protocol themselves: what they are given, and what they cannot do with it."""

from __future__ import annotations

import array
import mmap
import os
import random
import select
import socket
import struct
from collections.abc import Iterator

import driver_table as table
import pytest
from driver_table import OK, READ, UNSUPPORTED, Endpoint, Failed, Op

NBYTES = 1 << 20
REGION, KEY, READER = 7, bytes(range(16)), b"r" * 16
VERSION, HELLO, WELCOME, ASK, GRANT, REVOKED, LIFE = 0x4D435002, 1, 2, 3, 5, 6, 9
# version, kind, status, access, request, region, grant, length, secret, slot, token, body, reason
MESSAGE = struct.Struct("=IIiIQQQQ16sIIxxxxI256s200s")
SLOT = 9
# format, size, driver, boot, network namespace, name, secrets, TCP listener, extra
ADDRESS = struct.Struct("=II16s40sQ16s16s16s24x64x")
LEASE_BYTES = 64
LIMIT_S = 20.0


def message(kind: int, secret: bytes = b"", region: int = 0) -> bytes:
    return MESSAGE.pack(VERSION, kind, 0, 0, 1, region, 0, 0, secret, 0, 0, 0, b"", b"")


class Hostile:
    """A connection by hand."""

    def __init__(self, address: bytes) -> None:
        *_, name, self.secret, _ = ADDRESS.unpack(address)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(b"\0mooncake-shm-" + name.hex().encode())
        self.descriptors: list[int] = []

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def receive(self) -> tuple[int, list[int], tuple[int, ...]]:
        """Kind, descriptors that came along, and all fields; kind 0 at the end of the connection."""
        room = socket.CMSG_SPACE(4)
        try:
            data, control, _, _ = self.socket.recvmsg(MESSAGE.size, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return 0, [], ()
        passed = array.array("i")
        for _, _, bytes_ in control:
            passed.frombytes(bytes_[: len(bytes_) // 4 * 4])
        self.descriptors += passed
        fields = MESSAGE.unpack(data) if data else (0, 0)
        return fields[1], list(passed), fields

    def greet(self) -> tuple[int, int]:
        """The descriptors of the sign of life and of the lease page."""
        self.socket.send(message(HELLO, self.secret))
        kind, (life,), _ = self.receive()
        assert kind == LIFE
        kind, (leases,), _ = self.receive()
        assert kind == WELCOME
        return life, leases

    def ask(self, key: bytes) -> tuple[int, int]:
        """The region's descriptor, and the lease's slot."""
        self.socket.send(message(ASK, key, REGION))
        kind, (descriptor,), fields = self.receive()
        assert (kind, fields[2]) == (GRANT, OK)
        return descriptor, fields[SLOT]


@pytest.fixture
def owner() -> Iterator[Endpoint]:
    with Endpoint() as owner:
        yield owner


def check_alive(owner: Endpoint) -> None:
    """Others are served as before."""
    with Endpoint() as user:
        local, memory = user.allocate(NBYTES, 1, b"l" * 16)
        memory.release()
        connection = user.connect(owner.address())
        remote = user.import_key(connection, REGION, KEY, NBYTES)
        op = Op(opcode=READ, connection=connection, local=local, remote=remote, length=64)
        assert user.run([op]) == [(OK, "")]


def test_the_descriptor_of_a_reading_key_can_be_neither_written_nor_mapped_for_writing(
    owner: Endpoint,
) -> None:
    region, memory = owner.allocate(NBYTES, REGION, KEY)
    memory.release()
    owner.grant(region, READER, table.MAY_READ)
    with Hostile(owner.address()) as hostile:
        hostile.greet()
        descriptor, _ = hostile.ask(READER)
        mmap.mmap(descriptor, NBYTES, prot=mmap.PROT_READ).close()
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, NBYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)


def test_a_peer_cannot_tell_others_that_the_endpoint_has_gone(owner: Endpoint) -> None:
    with Hostile(owner.address()) as hostile:
        life, _ = hostile.greet()
        with pytest.raises(PermissionError):
            mmap.mmap(life, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(life, b"\0\0\0\x40", 0)


def test_leases_end_with_the_connection_of_a_peer_that_breaks_the_rules(owner: Endpoint) -> None:
    region, memory = owner.allocate(NBYTES, REGION, KEY)
    with Hostile(owner.address()) as hostile:
        _, page = hostile.greet()
        _, slot = hostile.ask(KEY)
        with mmap.mmap(page, (slot + 1) * LEASE_BYTES) as leases:
            word = struct.Struct("=II")
            count, token = word.unpack_from(leases, slot * LEASE_BYTES)
            word.pack_into(leases, slot * LEASE_BYTES, count + 1, token)  # a copy is in flight, it claims
            hostile.socket.send(b"no message")
            assert hostile.receive()[0] == 0
            limit = select.poll()  # nothing to wait on but time: the leases end right after the socket
            for _ in range(2000):
                if word.unpack_from(leases, slot * LEASE_BYTES)[1] != token:
                    break
                limit.poll(10)
            assert word.unpack_from(leases, slot * LEASE_BYTES)[1] != token
            whose = f"of 1 connections of peers, such as that of process {os.getpid()} were still in flight"
            with pytest.raises(table.Failed, match=whose) as failure:
                owner.deregister(region, 0.2)
            assert failure.value.code == table.TIMEOUT
            word.pack_into(leases, slot * LEASE_BYTES, 0, token + 1)
    owner.deregister(region, 10)
    memory.release()


def test_a_peer_of_another_host_is_told_apart_from_one_of_another_container(owner: Endpoint) -> None:
    """By the boot of its kernel: nothing is wrong with the first, and the second could share memory."""
    fields = list(ADDRESS.unpack(owner.address()))
    fields[3] = b"00000000-0000-0000-0000-000000000000"
    with pytest.raises(Failed, match="another host") as failure:
        owner.connect(ADDRESS.pack(*fields))
    assert failure.value.code == UNSUPPORTED


@pytest.mark.parametrize("secret", [b"", b"x" * 16])
def test_who_does_not_know_the_address_is_given_nothing(owner: Endpoint, secret: bytes) -> None:
    with Hostile(owner.address()) as hostile:
        hostile.socket.send(message(HELLO, secret))
        assert hostile.receive()[:2] == (0, [])


def test_random_packets_end_their_connection_and_nothing_else(owner: Endpoint) -> None:
    _, memory = owner.allocate(NBYTES, REGION, KEY)
    memory.release()
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    for _ in range(300):
        with Hostile(owner.address()) as hostile:
            if chance.random() < 0.5:
                hostile.greet()
            for _ in range(chance.randrange(1, 8)):
                packet = bytearray(message(chance.randrange(10), hostile.secret, REGION))
                for _ in range(chance.randrange(4)):
                    packet[chance.randrange(len(packet))] = chance.randrange(256)
                shorter = chance.randrange(1, len(packet))
                try:
                    hostile.socket.send(packet[: chance.choice([len(packet), shorter])])
                except (BrokenPipeError, ConnectionResetError):
                    break
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    check_alive(owner)
