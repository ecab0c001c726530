"""How two ranks connect: one listens, the other says who it is and gets an answer."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import time
from typing import Any, NamedTuple

from mooncake_ep.pg.wire.frames import Lane
from mooncake_ep.pg.wire.neighbours import Lent

__all__ = [
    "GREETING",
    "Address",
    "Greeting",
    "address_of",
    "answer",
    "dial",
    "listening",
    "own_hosts",
    "tune",
]

GREETING = struct.Struct("<8s16sIIQ")
ANSWER = struct.Struct("<B7xQ")
_MAGIC = b"mcpgwir1"
_ACCEPTED = 1
_SIOCGIFADDR = 0x8915
_DIAL_S = 2.0
_UNACKNOWLEDGED_MS = 1000  # after which the system takes the other host, or the way there, for lost


class Address(NamedTuple):
    """Where a process listens: hosts to be tried in order, and a port; and what it lends on its host."""

    life: int
    hosts: tuple[str, ...]
    port: int
    lent: Lent


def address_of(told: list[Any]) -> Address:
    """Return an address as it comes out of JSON."""
    life, hosts, port, lent = told
    return Address(life, tuple(hosts), port, Lent(*lent))


class Greeting(NamedTuple):
    """Who connects, and for which lane."""

    rank: int
    life: int
    lane: Lane

    def pack(self, secret: bytes) -> bytes:
        """Return what is sent; `secret`: 16 bytes that only processes of the group know."""
        return GREETING.pack(_MAGIC, secret, self.rank, self.lane, self.life)

    @classmethod
    def unpack(cls, data: bytes, secret: bytes) -> Greeting | None:
        """Return who it is; None for a stranger."""
        magic, said, rank, lane, life = GREETING.unpack(data)
        if magic != _MAGIC or said != secret or lane >= len(Lane):
            return None
        return cls(rank, life, Lane(lane))


def answer(life: int, *, accepted: bool) -> bytes:
    """Return the answer to a greeting."""
    return ANSWER.pack(_ACCEPTED if accepted else 0, life)


def listening() -> socket.socket:
    """Return a socket that listens on every address of this host."""
    listener = socket.create_server(("", 0), backlog=256)
    listener.setblocking(False)
    return listener


def own_hosts() -> tuple[str, ...]:
    """Return the IPv4 addresses of this host's interfaces, those of the host itself last."""
    found: list[str] = []
    own = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                host = socket.inet_ntoa(packed[20:24])
                (own if host.startswith("127.") else found).append(host)
    return tuple(dict.fromkeys(found + own))


def tune(connection: socket.socket, lane: Lane) -> None:
    """Set what a connection of a lane needs."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if lane is Lane.CONTROL:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    connection.setblocking(False)


def dial(
    address: Address, rank: int, life: int, secret: bytes, deadline: float
) -> list[socket.socket] | None:
    """Connect all lanes to a process. None when it is not there, is another one by now, or refuses."""
    for host in address.hosts:
        made: list[socket.socket] = []
        try:
            for lane in Lane:
                made.append(_dial_lane(host, address, Greeting(rank, life, lane), secret, deadline))
        except OSError:
            for connection in made:
                connection.close()
            continue
        return made
    return None


def _dial_lane(
    host: str, address: Address, greeting: Greeting, secret: bytes, deadline: float
) -> socket.socket:
    limit_s = max(min(_DIAL_S, deadline - time.monotonic()), 0.05)
    connection = socket.create_connection((host, address.port), timeout=limit_s)
    try:
        connection.sendall(greeting.pack(secret))
        said = connection.recv(ANSWER.size, socket.MSG_WAITALL)
        if len(said) != ANSWER.size or ANSWER.unpack(said) != (_ACCEPTED, address.life):
            raise ConnectionRefusedError(f"{host}:{address.port} is another process by now, or refuses")
        tune(connection, greeting.lane)
    except BaseException:
        connection.close()
        raise
    return connection
