"""What a peer can make a channel hold is bounded, and every wait ends."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer._core import Channel
from mooncake_transfer.errors import CallTimeout, ConfigError, PeerUnreachable, RemoteError

DEADLINE_S = 10.0
MIB = 1 << 20

OpenChannel = Callable[..., Channel]
Connect = Callable[[Channel], Any]
Serve = Callable[[Channel], tuple[int, Any]]


def send_until_full(connected: socket.socket, data: bytes, limit: int) -> int:
    """Send until nothing more was taken for half a second, or ``limit`` bytes; returns how many bytes."""
    connected.settimeout(0.5)
    sent = 0
    try:
        while sent < limit:
            sent += connected.send(data[sent % len(data) :])
    except TimeoutError:
        pass
    connected.settimeout(DEADLINE_S)
    return sent


@pytest.mark.parametrize("kind", ["REQUEST", "NOTIFY"])
def test_a_peer_whose_messages_nobody_takes_is_not_read_from_until_they_are_taken(
    open_channel: OpenChannel, stranger: Connect, kind: str
) -> None:
    channel = open_channel(queued_bytes=MIB)
    peer = stranger(channel)
    peer.greet()
    assert channel.next_event(DEADLINE_S) is not None
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    body = bytes(100_000)
    message = len(body).to_bytes(4, "little") + bytes([1, getattr(peer, kind), 1, 0]) + bytes(8) + b"m" + body
    sent = send_until_full(peer.socket, message, 64 * MIB)
    assert MIB < sent < 32 * MIB
    take = channel.next_request if kind == "REQUEST" else channel.next_event
    rest = message[sent % len(message) :] if sent % len(message) else b""
    taken = 0
    for _ in range(-(-sent // len(message)) - (1 if rest else 0)):
        item = take(DEADLINE_S)
        assert item is not None
        assert item[4] == body
        taken += 1
    peer.socket.sendall(rest + message)
    for _ in range(2 if rest else 1):
        assert take(DEADLINE_S) is not None
    assert taken > 5


def test_many_small_messages_are_bounded_too(open_channel: OpenChannel, stranger: Connect) -> None:
    channel = open_channel(queued_messages=100)
    peer = stranger(channel)
    peer.greet()
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    message = bytes(4) + bytes([1, peer.REQUEST, 0, 0]) + bytes(8)
    assert send_until_full(peer.socket, message, 64 * MIB) < 32 * MIB
    for _ in range(1000):
        assert channel.next_request(DEADLINE_S) is not None


def test_a_notification_waits_for_a_slow_peer_at_most_until_its_deadline(
    open_channel: OpenChannel, strange_server: Serve
) -> None:
    channel = open_channel(unsent_bytes=2 * MIB)
    connection, server = strange_server(channel)
    body = bytes(MIB)
    reason, started = "", 0.0
    while not reason:
        started = time.monotonic()
        try:
            channel.notify(connection, "note", body, 0.3)
        except CallTimeout as error:
            reason = str(error)
    assert re.search(r"127\.0\.0\.1:\d+ does not read what it is sent.*MiB wait", reason)
    assert 0.25 < time.monotonic() - started < DEADLINE_S
    with pytest.raises(CallTimeout, match="does not read"):
        channel.call(connection, "anything", b"", 0.1)
    assert channel.alive(connection)
    assert server.read()[0] == server.NOTIFY
    server.read()
    channel.notify(connection, "note", b"", DEADLINE_S)


def test_a_peer_that_reads_nothing_for_longer_than_the_limit_of_silence_keeps_its_connection(
    open_channel: OpenChannel, strange_server: Serve
) -> None:
    channel = open_channel(unsent_bytes=MIB, silence_s=1.0)
    connection, server = strange_server(channel)
    waited_s = 0.0
    while waited_s < 3:  # its kernel still answers, as that of a stopped process does
        started = time.monotonic()
        with contextlib.suppress(CallTimeout):
            channel.notify(connection, "note", bytes(MIB), 3.2)
        waited_s = time.monotonic() - started
    assert channel.alive(connection)
    assert server.read()[0] == server.NOTIFY


def test_a_peer_that_does_not_read_its_answers_is_dropped_and_others_are_served(
    open_channel: OpenChannel, stranger: Connect, answering: Callable[[Channel], None]
) -> None:
    channel = open_channel(max_answers=4 * MIB)
    peer = stranger(channel)
    peer.greet()
    assert channel.next_event(DEADLINE_S) is not None
    for request in range(2, 18):
        peer.send(peer.REQUEST, request=request)
    for _ in range(16):
        item = channel.next_request(DEADLINE_S)
        assert item is not None
        with contextlib.suppress(PeerUnreachable):  # from which answer on, depends on the kernel's buffers
            channel.reply(item[1], item[2], False, bytes(2 * MIB))
    event = channel.next_event(DEADLINE_S)
    assert event is not None
    assert (event[0], b"does not read its answers" in event[4]) == ("lost", True)
    answering(channel)
    asker = open_channel()
    connection, _ = asker.connect("127.0.0.1", channel.port, DEADLINE_S)
    assert asker.call(connection, "reverse", b"ab", DEADLINE_S) == (False, b"ba")


def test_a_connection_that_never_greets_is_told_so_and_dropped(
    open_channel: OpenChannel, stranger: Connect
) -> None:
    channel = open_channel(greeting_s=0.2)
    frames = stranger(channel).read_until_the_end()
    assert [(kind, body) for kind, _, body in frames] == [(7, b"no hello came in time")]
    event = channel.next_event(DEADLINE_S)
    assert event is not None
    assert (event[0], b"no hello" in event[4]) == ("refused", True)


def test_the_oldest_stranger_makes_room_when_there_are_too_many(
    open_channel: OpenChannel, stranger: Connect
) -> None:
    channel = open_channel(ungreeted=4)
    strangers = [stranger(channel) for _ in range(6)]
    assert b"too many" in strangers[0].read_until_the_end()[0][2]
    assert b"too many" in strangers[1].read_until_the_end()[0][2]
    for late in strangers[2:]:
        late.greet()
    stranger(channel).greet()


def test_running_out_of_descriptors_costs_no_cpu_and_is_recovered_from(
    open_channel: OpenChannel, stranger: Connect
) -> None:
    channel = open_channel()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 512), before[1]))
    try:
        waiting = stranger(channel)
        waiting.greet()
        extra = socket.socket()
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        extra.connect(("127.0.0.1", channel.port))
        started, cpu = time.monotonic(), time.process_time()
        told = 0
        while told < 5:  # looked at ten times a second
            event = channel.next_event(DEADLINE_S)
            assert event is not None
            told += event[0] == "refused"
            assert event[0] != "refused" or b"raise `ulimit -n`" in event[4]
        assert time.monotonic() - started > 0.35
        assert time.process_time() - cpu < 0.3 * (time.monotonic() - started)
        with pytest.raises(PeerUnreachable, match="ulimit -n"):
            channel.connect("127.0.0.1", channel.port, DEADLINE_S)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with extra:
        late = type(waiting)(extra)
        late.greet()


RESOLVER_HANGS = """
import socket, time
from mooncake_transfer._core import Channel
from mooncake_transfer.errors import PeerUnreachable
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
channel = Channel()
channel.listen("127.0.0.1", 0)
channel.start(b"")
started = time.monotonic()
try:
    channel.connect("nowhere.test", 7000, 0.5)
except PeerUnreachable as error:
    print(error)
print(time.monotonic() - started)
channel.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process a network of its own")
def test_a_resolver_that_does_not_answer_does_not_outlast_the_deadline() -> None:
    script = (
        "ip link set lo up && mount -t tmpfs none /mnt && echo 'nameserver 127.0.0.1' > /mnt/resolv.conf"
        ' && mount --bind /mnt/resolv.conf /etc/resolv.conf && exec "$@"'
    )
    command = ["unshare", "--net", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", RESOLVER_HANGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    text, elapsed = done.stdout.splitlines()
    assert "cannot resolve 'nowhere.test': the resolver" in text
    assert 0.4 < float(elapsed) < 4


def test_ipv6_addresses_stand_in_brackets(open_channel: OpenChannel) -> None:
    here, there = open_channel(), open_channel(b"six", host="::1")
    assert here.connect("::1", there.port, DEADLINE_S)[1] == b"six"
    there.close()
    with pytest.raises(PeerUnreachable, match=rf"\[::1\]:{there.port}"):
        here.connect("::1", there.port, DEADLINE_S)


def test_engines_reach_each_other_over_ipv6() -> None:
    with (
        TransferEngine(TransferConfig(host="::1", drivers=("tcp",))) as here,
        TransferEngine(TransferConfig(host="::1", drivers=("tcp",))) as there,
    ):
        assert there.address.startswith("[::1]:")
        there.serve("who", lambda payload, caller: caller.address.encode())
        assert here.connect(there.address).call("who") == here.address.encode()
        target, source = there.register(bytearray(8)), here.register(bytearray(b"12345678"))
        here.write(source, here.import_region(target.descriptor()), [(0, 0, 8)]).wait()


def test_an_answer_over_the_limit_is_an_error_at_the_caller_and_the_next_is_answered() -> None:
    config = TransferConfig(drivers=("tcp",), handler_threads=1)
    with TransferEngine(config) as here, TransferEngine(config) as there:
        there.serve("zeros", lambda payload, caller: bytes(int(payload)))
        peer = here.connect(there.address)
        with pytest.raises(RemoteError, match=r"ConfigError.*move bulk data"):
            peer.call("zeros", b"67108865")
        assert peer.call("zeros", b"3") == bytes(3)


def free_range(count: int) -> int:
    """The first of ``count`` ports in a row that were free a moment ago."""
    for first in range(21000, 60000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def test_the_first_free_port_of_a_range_is_taken() -> None:
    first = free_range(3)
    with socket.create_server(("127.0.0.1", first)):
        config = TransferConfig(port_range=(first, first + 1), drivers=("tcp",))
        with TransferEngine(config) as engine:
            assert engine.address == f"127.0.0.1:{first + 1}"
            with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{first} to {first + 1}.*choose another"):
                TransferEngine(config)
    for wrong in ((0, 5), (9, 8), (1, 70000)):
        with pytest.raises(ConfigError, match="port_range"):
            TransferConfig(port_range=wrong)
    with pytest.raises(ConfigError, match="set one of them"):
        TransferConfig(port=7000, port_range=(7000, 7001))
