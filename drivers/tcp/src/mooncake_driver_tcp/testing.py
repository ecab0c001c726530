"""The wire format in Python, to test targets with: an initiator that says exactly what a test wants said."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Address", "Client", "Frame", "Op", "Refusal", "parse_address"]

# magic, version, op, flags, seq, region, key, offset, length, status, reserved: see the README
HEADER = struct.Struct("<4sBBHQQ16sQQiI")
ADDRESS = struct.Struct("<4s16sHB")
TIMEOUT_S = 10.0


class Op(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    WELCOME = 2
    WRITE = 3
    WRITE_DONE = 4
    READ = 5
    READ_DATA = 6


class Refusal(IntEnum):
    """Why a target refused: ``flags`` of its answer."""

    UNKNOWN_REGION = 1
    WRONG_KEY = 2
    OUTSIDE = 3
    CLOSING = 4
    REVOKED = 5
    FORBIDDEN = 6


@dataclass(frozen=True, slots=True)
class Frame:
    """One header, in the order of the wire but for what seldom differs."""

    op: int
    flags: int = 0
    seq: int = 0
    region: int = 0
    key: bytes = bytes(16)
    offset: int = 0
    length: int = 0
    status: int = 0
    magic: bytes = b"MCT1"
    version: int = 2
    reserved: int = 0

    def packed(self) -> bytes:
        """Its 64 bytes on the wire."""
        head = (self.magic, self.version, self.op, self.flags, self.seq, self.region, self.key)
        return HEADER.pack(*head, self.offset, self.length, self.status, self.reserved)

    @classmethod
    def unpacked(cls, header: bytes) -> Frame:
        """Parse 64 bytes. Raises struct.error when there are fewer."""
        magic, version, op, flags, seq, region, key, offset, length, status, reserved = HEADER.unpack(header)
        return cls(op, flags, seq, region, key, offset, length, status, magic, version, reserved)


@dataclass(frozen=True, slots=True)
class Address:
    """What an endpoint's address blob holds."""

    nonce: bytes
    port: int
    hosts: tuple[str, ...]
    encrypted: bool = False


def parse_address(blob: bytes) -> Address:
    """Parse an address blob. Raises ValueError when it is none."""
    magic, nonce, port, count = ADDRESS.unpack_from(blob)
    hosts, at = [], ADDRESS.size
    for _ in range(count):
        hosts.append(blob[at + 1 : at + 1 + blob[at]].decode())
        at += 1 + blob[at]
    if magic not in (b"MCTA", b"MCTS") or at != len(blob):
        raise ValueError(f"{len(blob)} bytes are no address of a tcp endpoint")
    return Address(nonce, port, tuple(hosts), encrypted=magic == b"MCTS")


class Client:
    """One connection to a target, made by hand. Every wait ends after 10 s. A context manager.

    Attributes:
        socket: the connection, to do with as a test pleases.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Connect, and say nothing yet."""
        self.socket = socket.create_connection((host, port), timeout=TIMEOUT_S)

    def send(self, frame: Frame, payload: bytes = b"") -> None:
        """Send a header and what shall follow it."""
        self.socket.sendall(frame.packed() + payload)

    def receive(self, nbytes: int) -> bytes:
        """Receive so many bytes, or what came before the connection ended."""
        received = bytearray()
        while len(received) < nbytes:
            more = self._some(nbytes - len(received))
            if not more:
                break
            received += more
        return bytes(received)

    def answer(self) -> Frame:
        """Receive a header."""
        return Frame.unpacked(self.receive(HEADER.size))

    def greet(self, nonce: bytes) -> Frame:
        """Say hello to the endpoint with this nonce and return its answer."""
        self.send(Frame(Op.HELLO, key=nonce))
        return self.answer()

    def is_dropped(self) -> bool:
        """Wait for the next byte; true when the connection ends instead."""
        return self._some(1) == b""

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _some(self, most: int) -> bytes:
        try:
            return self.socket.recv(most)
        except ConnectionResetError:
            return b""
