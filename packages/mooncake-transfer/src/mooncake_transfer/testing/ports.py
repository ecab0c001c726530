"""Ports for servers of tests that are started at a port that is known before."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]

SERVER_PORTS = range(10_000, 30_000)  # below net.ipv4.ip_local_port_range, which begins at 32768
TRIES = 100


def free_port() -> int:
    """A port of 127.0.0.1 that nothing uses now, for a server that binds it a moment later, or once more.

    None of those that the kernel gives out: a connection of anybody could take one of them meanwhile, and
    a client that tries to reach a server which is down could even reach itself. Raises OSError.
    """
    for port in random.SystemRandom().sample(SERVER_PORTS, TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(
        f"none of {TRIES} ports of {SERVER_PORTS.start} to {SERVER_PORTS.stop - 1} is free; end other servers"
    )
