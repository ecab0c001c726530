"""Two network namespaces joined by a wire that a test can make long, lossy, or cut.

The wire is a thread that carries packets between two TUN devices, so it needs root and ``/dev/net/tun``, and
none of the kernel's traffic shaping::

    with NetworkPair() as network:
        network.wire(delay_s=0.05, loss=0.01)
        subprocess.run([*network.inside(0), "ping", network.addresses[1]])
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

__all__ = ["NetworkPair", "NetworkUnavailable"]

TUN = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 1500
PACKET_BYTES = 65536
COMMAND_S = 30.0


class NetworkUnavailable(Exception):
    """This machine does not let a test have namespaces of its own; the message says why."""


class NetworkPair:
    """Two namespaces with one address each, and the wire between them. A context manager.

    Attributes:
        addresses: of the two ends.
        carried_bytes: what the wire has taken from both ends, headers and lost packets among it.
        lost_packets: how many of them did not arrive, as ``wire(loss=...)`` or ``cut()`` wants it.
    """

    addresses = ("198.18.0.1", "198.18.0.2")  # set apart for tests of networks (RFC 2544)

    def __init__(self, *, seed: int = 0) -> None:
        """Make them. Raises NetworkUnavailable. ``seed``: which packets a lossy wire loses."""
        self._names = tuple(f"mc{os.getpid()}-{end}" for end in "ab")
        self._delay_s = self._loss = 0.0
        self.carried_bytes = self.lost_packets = 0
        self._up = True
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            tuns = [self._make_end(undo, end) for end in (0, 1)]
            stop_read, stop_write = os.pipe()
            undo.callback(os.close, stop_read)
            thread = threading.Thread(target=self._carry, args=(tuns, stop_read), name="wire", daemon=True)
            thread.start()
            undo.callback(thread.join, COMMAND_S)
            undo.callback(os.close, stop_write)
            self._undo = undo.pop_all()

    def _make_end(self, undo: contextlib.ExitStack, end: int) -> int:
        name = self._names[end]
        _run("ip", "netns", "add", name)
        undo.callback(_run, "ip", "netns", "del", name)
        try:
            tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            undo.callback(os.close, tun)
            fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI))
        except OSError as error:
            raise NetworkUnavailable(f"no TUN device: {error}") from None
        _run("ip", "link", "set", name, "netns", name)
        _run("ip", "-n", name, "addr", "add", f"{self.addresses[end]}/24", "dev", name)
        _run("ip", "-n", name, "link", "set", name, "mtu", str(MTU), "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        return tun

    def inside(self, end: int) -> list[str]:
        """Return what a command has to begin with to run in the namespace of an end."""
        return ["ip", "netns", "exec", self._names[end]]

    def use_link_local(self) -> tuple[str, str]:
        """Leave the interfaces no other addresses; return these, each with ``%`` and its interface.

        Raises NetworkUnavailable where the kernel has no IPv6.
        """
        hosts = []
        for end, name in enumerate(self._names, 1):
            _run("ip", "-n", name, "addr", "flush", "dev", name)
            _run("ip", "-n", name, "addr", "add", f"fe80::{end}/64", "dev", name, "nodad")
            hosts.append(f"fe80::{end}%{name}")
        return hosts[0], hosts[1]

    def wire(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Hold each packet back for ``delay_s`` in each direction, and lose a share of them."""
        with self._lock:
            self._delay_s, self._loss = delay_s, loss

    def cut(self) -> None:
        """Lose every packet, as an unplugged cable does, without telling either end."""
        with self._lock:
            self._up = False

    def plug(self) -> None:
        """Undo ``cut()``."""
        with self._lock:
            self._up = True

    def link(self, end: int, *, up: bool) -> None:
        """Take the interface of an end down or up, which that end sees at once."""
        name = self._names[end]
        _run("ip", "-n", name, "link", "set", name, "up" if up else "down")

    def close(self) -> None:
        """Remove both. Safe to call twice."""
        self._undo.close()

    def __enter__(self) -> NetworkPair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _carry(self, tuns: list[int], stop: int) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []  # due, number, where to, packet
        number = 0
        with selectors.DefaultSelector() as selector:
            selector.register(stop, selectors.EVENT_READ)
            for tun, other in zip(tuns, reversed(tuns), strict=True):
                selector.register(tun, selectors.EVENT_READ, other)
            while True:
                wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
                for key, _ in selector.select(wait_s):
                    if key.fd == stop:
                        return
                    # A device that is down gives EIO for as long as it is.
                    with contextlib.suppress(OSError):
                        packet = os.read(key.fd, PACKET_BYTES)
                        number += 1
                        self.carried_bytes += len(packet)
                        if (due_s := self._due_s()) is None:
                            self.lost_packets += 1
                        else:
                            heapq.heappush(under_way, (due_s, number, key.data, packet))
                while under_way and under_way[0][0] <= time.monotonic():
                    _, _, where, packet = heapq.heappop(under_way)
                    with contextlib.suppress(OSError):
                        os.write(where, packet)

    def _due_s(self) -> float | None:
        with self._lock:
            if not self._up or self._random.random() < self._loss:
                return None
            return time.monotonic() + self._delay_s


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S)
    except FileNotFoundError:
        raise NetworkUnavailable(f"{command[0]!r} is not installed; install iproute2") from None
    except subprocess.CalledProcessError as error:
        raise NetworkUnavailable(f"{' '.join(command)}: {error.stderr.strip()}") from None
