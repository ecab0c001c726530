"""Malformed frames harm nobody. ``tests/sanitize/channel_fuzz.cpp`` does the same millions of times."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake_transfer._core import Channel

DEADLINE_S = 10.0
FRAMES = 1500
HEADER = struct.Struct("<IBBHQ")

OpenChannel = Callable[..., Channel]
Mutation = Callable[[random.Random], bytes]


def some_frame(rng: random.Random) -> bytes:
    method, body = rng.randbytes(rng.randrange(20)), rng.randbytes(rng.randrange(300))
    return HEADER.pack(len(body), 1, rng.randrange(1, 8), len(method), rng.randrange(64)) + method + body


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 200))


def truncated(rng: random.Random) -> bytes:
    frame = some_frame(rng)
    return frame[: rng.randrange(1, len(frame))]


def flipped(rng: random.Random) -> bytes:
    frame = bytearray(some_frame(rng))
    for _ in range(rng.randrange(1, 9)):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return bytes(frame)


def huge(rng: random.Random) -> bytes:
    return rng.randrange(1 << 20, 1 << 32).to_bytes(4, "little") + some_frame(rng)[4:]


def other_version(rng: random.Random) -> bytes:
    frame = some_frame(rng)
    return frame[:4] + bytes([rng.randrange(2, 256)]) + frame[5:]


def hellos(rng: random.Random) -> bytes:
    return b"".join(HEADER.pack(0, 1, 1, 0, i) for i in range(rng.randrange(2, 40)))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("mutation", [noise, truncated, flipped, huge, other_version, hellos])
def test_a_good_peer_is_answered_among_malformed_frames_and_nothing_is_left_over(
    open_channel: OpenChannel, answering: Callable[[Channel], None], mutation: Mutation
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    logging.getLogger(__name__).warning("seed %d", seed)
    rng = random.Random(seed)
    target, friendly = open_channel(), open_channel()
    answering(target)
    connection, _ = friendly.connect("127.0.0.1", target.port, DEADLINE_S)
    gc.collect()
    before, memory = descriptors(), 0
    for i in range(FRAMES // 6):
        with socket.create_connection(("127.0.0.1", target.port), DEADLINE_S) as stranger:
            greeting = HEADER.pack(0, 1, 1, 0, 1) if rng.random() < 0.7 else b""
            with contextlib.suppress(ConnectionError):
                stranger.sendall(greeting + mutation(rng))
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if i % 25 == 24:
            body = rng.randbytes(64)
            assert friendly.call(connection, "reverse", body, DEADLINE_S) == (False, body[::-1])
            while target.next_event(0.0) is not None:
                pass
            memory = memory or resident_bytes()
    end = time.monotonic() + DEADLINE_S
    while descriptors() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert descriptors() <= before
    assert resident_bytes() - memory < 32 << 20


def test_a_thousand_connections_come_and_go_without_a_trace(
    open_channel: OpenChannel, answering: Callable[[Channel], None]
) -> None:
    here, there = open_channel(), open_channel()
    answering(there)
    gc.collect()
    before, memory = descriptors(), 0
    for i in range(1000):
        connection, _ = here.connect("127.0.0.1", there.port, DEADLINE_S)
        assert here.call(connection, "reverse", b"ab", DEADLINE_S) == (False, b"ba")
        here.disconnect(connection)
        memory = memory or (resident_bytes() if i == 100 else 0)
    seen: dict[str, int] = {}
    while sum(seen.values()) < 2000:
        event = there.next_event(DEADLINE_S)
        assert event is not None
        seen[event[0]] = seen.get(event[0], 0) + 1
    assert seen == {"hello": 1000, "lost": 1000}
    end = time.monotonic() + DEADLINE_S
    while descriptors() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert descriptors() <= before
    assert resident_bytes() - memory < 16 << 20
