"""The control protocol in Python, so that queue pairs made by other means can be a peer of an endpoint."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

__all__ = ["Address", "Control", "Imported", "Places", "QueuePairs", "parse_address"]

HEADER = struct.Struct("<4sB3xI")
GREETING = struct.Struct("<16s16sQiBBB16sHB")
QP = struct.Struct("<II")
PLACES = struct.Struct("<QIB")
IMPORT = struct.Struct("<QQ16s")
IMPORTED = struct.Struct("<QiIQQII")
ADDRESS = struct.Struct("<4sB16sHB")
HELLO, WELCOME, ASK, ANSWER = 1, 2, 3, 4
NOTICE_BYTES = 512
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Address:
    """What an endpoint's address blob holds."""

    nonce: bytes
    port: int
    hosts: tuple[str, ...]


def parse_address(blob: bytes) -> Address:
    """Parse an address blob. Raises ValueError when it is none."""
    magic, version, nonce, port, count = ADDRESS.unpack_from(blob)
    hosts, at = [], ADDRESS.size
    for _ in range(count):
        hosts.append(blob[at + 1 : at + 1 + blob[at]].decode())
        at += 1 + blob[at]
    if magic != b"MCVA" or version != 1 or at != len(blob):
        raise ValueError(f"{len(blob)} bytes are no address of a verbs endpoint")
    return Address(nonce, port, tuple(hosts))


@dataclass(frozen=True, slots=True)
class Places:
    """Where notices are written, with the place's number as the immediate: ``slots`` for each queue pair.

    Each has ``NOTICE_BYTES`` bytes, and is used again when the endpoint has told on the control socket that
    it took what was there.
    """

    address: int
    rkey: int
    slots: int


@dataclass(frozen=True, slots=True)
class QueuePairs:
    """One side's queue pairs, as the other must know them.

    Attributes:
        numbers: of the queue pairs, each with its first packet sequence number.
        gid: address of the port, 16 bytes.
        mtu: largest packet, as verbs numbers it (1 is 256 bytes, 5 is 4096).
        rd_atomic: reads that may be outstanding on one.
        lid: local identifier, on InfiniBand.
        ethernet: whether the port is on Ethernet.
        places: where notices go; None: this side, or an endpoint with too many peers, has none.
    """

    numbers: tuple[tuple[int, int], ...]
    gid: bytes
    mtu: int
    rd_atomic: int = 1
    lid: int = 0
    ethernet: bool = True
    places: Places | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """What an endpoint says of a region: a status other than 0 comes with a reason and nothing else."""

    status: int
    access: int
    address: int
    length: int
    chunk_shift: int
    rkeys: tuple[int, ...]
    reason: str


class Control:
    """The control socket of one connection. Every wait ends after a minute. A context manager."""

    def __init__(self, address: Address) -> None:
        """Connect, and say nothing yet."""
        self._address = address
        self._socket = socket.create_connection((address.hosts[0], address.port), timeout=TIMEOUT_S)

    def greet(self, own: QueuePairs, session: bytes, generation: int = 1) -> QueuePairs:
        """Exchange queue pairs. Raises ConnectionRefusedError with the reason of the endpoint."""
        head = (self._address.nonce, session, generation, 0, own.mtu, own.rd_atomic, own.ethernet, own.gid)
        payload = GREETING.pack(*head, own.lid, len(own.numbers))
        payload += b"".join(QP.pack(*pair) for pair in own.numbers)
        answer = self._ask(HELLO, payload, WELCOME)
        _, _, _, status, mtu, rd_atomic, ethernet, gid, lid, count = GREETING.unpack_from(answer)
        rest = answer[GREETING.size :]
        if status:
            raise ConnectionRefusedError(rest.decode())
        pairs = tuple((number, psn) for number, psn in QP.iter_unpack(rest[: count * QP.size]))
        places = Places(*PLACES.unpack_from(rest, count * QP.size))
        told = places if places.slots else None
        return QueuePairs(pairs, gid, mtu, rd_atomic, lid, bool(ethernet), told)

    def import_key(self, region_id: int, key: bytes) -> Imported:
        """Ask where a region is."""
        answer = self._ask(ASK, IMPORT.pack(1, region_id, key), ANSWER)
        _, status, access, address, length, shift, count = IMPORTED.unpack_from(answer)
        rest = answer[IMPORTED.size :]
        rkeys = struct.unpack_from(f"<{count}I", rest)
        return Imported(status, access, address, length, shift, rkeys, rest[4 * count :].decode())

    def close(self) -> None:
        """End the connection, and with it the endpoint's queue pairs."""
        self._socket.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, kind: int, payload: bytes, expected: int) -> bytes:
        self._socket.sendall(HEADER.pack(b"MCV1", kind, len(payload)) + payload)
        magic, answered, length = HEADER.unpack(self._receive(HEADER.size))
        if (magic, answered) != (b"MCV1", expected):
            raise ConnectionError(f"message {expected} was expected, {answered} came")
        return self._receive(length)

    def _receive(self, nbytes: int) -> bytes:
        received = bytearray()
        while len(received) < nbytes:
            more = self._socket.recv(nbytes - len(received))
            if not more:
                raise ConnectionResetError("the endpoint closed the control socket")
            received += more
        return bytes(received)
