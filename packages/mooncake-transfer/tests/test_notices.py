"""Notifications behind a write in the queue of its driver: after the bytes, once, from whom they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest

from mooncake_transfer import RailConfig, Region, RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, TransferCancelled, TransferError
from mooncake_transfer.peer import Caller
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

DEADLINE_S = 20.0
NOTICES = {"notice_bytes": 256}
PATIENT = RailConfig(breaker_pause_s=0.05, suspect_pause_s=0.01, attempts=5)


class Target:
    """An engine with one region, which keeps what it was told and what its memory held then."""

    def __init__(self, stack: ExitStack, fabric: FakeFabric, host: str, nbytes: int, **config: Any) -> None:
        self.engine = stack.enter_context(TransferEngine(fabric.config(host, **config)))
        self.region: Region = self.engine.allocate(nbytes)
        self.told: list[tuple[bytes, Caller, int]] = []
        self.engine.serve("done", self._take)

    def _take(self, payload: bytes, caller: Caller) -> None:
        memory = bytes_of(self.region)
        self.told.append((payload, caller, int(memory[-1]) if memory[0] == memory[-1] else -1))

    @property
    def payloads(self) -> list[bytes]:
        return [payload for payload, _, _ in self.told]

    def counter(self, name: str) -> int:
        return sum(row[name] for row in self.engine.stats().values())

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.told) >= count, f"{count} notifications arrive")


class Sender:
    """An engine that writes one value all over a target's region and says which."""

    def __init__(
        self, stack: ExitStack, fabric: FakeFabric, host: str, target: Target, **config: Any
    ) -> None:
        self.engine = stack.enter_context(TransferEngine(fabric.config(host, **config)))
        self.remote: RemoteRegion = self.engine.import_region(target.region.descriptor())
        self.local: Region = self.engine.allocate(target.region.nbytes)
        self.target = target

    @property
    def sent(self) -> int:
        return sum(row["notices_sent"] for row in self.engine.stats().values())

    def post(self, value: int, payload: bytes | None = None, **options: Any) -> Transfer:
        bytes_of(self.local)[:] = value
        told = bytes([value]) if payload is None else payload
        rows = [[0, 0, self.local.nbytes]]
        return self.engine.write(self.local, self.remote, rows, notify=("done", told), **options)

    def write(self, value: int, payload: bytes | None = None, **options: Any) -> None:
        self.post(value, payload, **options).wait(DEADLINE_S)

    def warm_up(self) -> None:
        """Write until notices are sent: the first ones go over the channel, until the peer has agreed."""

        def noticed() -> bool:
            self.engine.write(self.local, self.remote, [[0, 0, 1]], notify=("done", b"")).wait(DEADLINE_S)
            return self.sent > 0

        wait_until(noticed, "the driver carries notifications")
        self.engine.connect(self.target.engine.address).notify("done", b"last")
        wait_until(lambda: b"last" in self.target.payloads, "all that was sent arrives")
        self.target.told.clear()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(
    stack: ExitStack,
    nbytes: int = 1 << 16,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    **config: Any,
) -> tuple[FakeFabric, Sender, Target]:
    fabric = stack.enter_context(FakeFabric(seed=seed))
    settings = {"options": NOTICES | (options or {}), **config}
    target = Target(stack, fabric, "far", nbytes, **settings)
    sender = Sender(stack, fabric, "near", target, **settings)
    sender.warm_up()
    return fabric, sender, target


@pytest.mark.parametrize("nbytes", [1, 4096, 1 << 20, 24 << 20])
def test_a_notice_comes_after_the_last_byte_and_instead_of_a_message_over_the_channel(
    stack: ExitStack, nbytes: int
) -> None:
    fabric, sender, target = pair(stack, nbytes, options={"max_op_bytes": 1 << 20})
    fabric.device("near").slow(latency_s=0.0005, jitter_s=0.002)
    before = sender.sent
    for value in range(1, 9):
        sender.write(value)
        target.wait_for(value)
    assert [(payload[0], seen) for payload, _, seen in target.told] == [(v, v) for v in range(1, 9)]
    assert sender.sent == before + 8
    assert target.counter("notices_dropped") == 0


def test_a_handler_learns_who_sent_a_notice(stack: ExitStack) -> None:
    _, sender, target = pair(stack)
    sender.write(1)
    target.wait_for(1)
    assert target.told[0][1].address == sender.engine.address
    assert target.told[0][1].epoch == sender.engine.epoch


def test_a_notice_wakes_an_engine_that_does_nothing(stack: ExitStack) -> None:
    fabric, sender, target = pair(stack)
    fabric.device("near").spoil_notices(delay_s=1.0)
    transfer = sender.post(7)
    wait_until(lambda: transfer.bytes_done == transfer.nbytes, "the bytes move")
    assert not target.told
    transfer.wait(DEADLINE_S)
    target.wait_for(1)
    assert target.payloads == [b"\x07"]


@pytest.mark.parametrize("how", ["fail", "doubtful"])
def test_a_notice_that_fails_is_delivered_once_all_the_same(stack: ExitStack, how: str) -> None:
    fabric, sender, target = pair(stack)
    fabric.device("near").spoil_notices(**{how: 3})
    for value in range(1, 7):
        sender.write(value)
    target.wait_for(6)
    sender.write(9, b"last")
    wait_until(lambda: b"last" in target.payloads, "the last one arrives")
    assert target.payloads == [bytes([v]) for v in range(1, 7)] + [b"last"]


def test_a_notice_that_was_delivered_and_never_completes_is_not_delivered_again(stack: ExitStack) -> None:
    fabric, sender, target = pair(stack)
    fabric.device("near").spoil_notices(lose=1)
    transfer = sender.post(3)
    target.wait_for(1)
    assert not transfer.done()
    transfer.cancel()  # every byte has moved, so there is nothing left to cancel but the notice
    transfer.wait(DEADLINE_S)
    sender.write(4)
    target.wait_for(2)
    assert target.payloads == [b"\x03", b"\x04"]


def test_a_rail_that_dies_between_bytes_and_notice_loses_nothing(stack: ExitStack) -> None:
    fabric, sender, target = pair(stack, rails=PATIENT)
    for value in range(1, 6):
        fabric.device("near").spoil_notices(delay_s=60.0)
        transfer = sender.post(value)
        wait_until(lambda: transfer.bytes_done == transfer.nbytes, "the bytes move")  # noqa: B023
        fabric.device("near").die()
        transfer.wait(DEADLINE_S)
        fabric.device("near").revive()
        fabric.device("near").spoil_notices(delay_s=0.0)
        target.wait_for(value)
    assert [(payload[0], seen) for payload, _, seen in target.told] == [(v, v) for v in range(1, 6)]


def test_writes_that_fail_and_are_tried_again_are_told_of_once_after_the_last_byte(stack: ExitStack) -> None:
    seed = 11
    fabric, sender, target = pair(stack, 8 << 20, seed=seed, rails=PATIENT, options={"max_op_bytes": 1 << 19})
    fabric.device("near").slow(jitter_s=0.001)
    for value in range(1, 31):
        fabric.device("near").fail(next=value % 3)
        sender.write(value)
        target.wait_for(value)
    told = [(payload[0], seen) for payload, _, seen in target.told]
    assert told == [(v, v) for v in range(1, 31)], f"seed {seed}"


def test_several_rails_and_big_payloads_go_over_the_channel(stack: ExitStack) -> None:
    fabric, sender, target = pair(stack, 16 << 20, devices=2, rails=RailConfig(slow_ratio=1e6))
    for device in range(2):
        fabric.device("near", device).slow(bandwidth=1e9)
    before = sender.sent
    spread = sender.post(5)
    spread.wait(DEADLINE_S)
    assert len(spread.bytes_by_rail) == 2
    target.wait_for(1)
    for payload in (b"x" * 255, b"x" * 70_000):
        sender.engine.write(sender.local, sender.remote, [[0, 0, 9]], notify=("done", payload)).wait(
            DEADLINE_S
        )
    target.wait_for(3)
    assert [len(payload) for payload in target.payloads] == [1, 255, 70_000]
    assert target.told[0][2] == 5
    assert sender.sent == before


def test_reads_and_checked_writes_are_told_of_over_the_channel(stack: ExitStack) -> None:
    _, sender, target = pair(stack)
    before = sender.sent
    rows = [[0, 0, sender.local.nbytes]]
    sender.engine.read(sender.local, sender.remote, rows, notify=("done", b"read")).wait(DEADLINE_S)
    sender.write(1, b"checked", verify=True)
    target.wait_for(2)
    assert (target.payloads, sender.sent) == ([b"read", b"checked"], before)


def test_nothing_is_overtaken_by_a_notice_nor_overtakes_one(stack: ExitStack) -> None:
    """Messages over the channel and notices of one sender, over two rails that give them out in no order."""
    fabric, sender, target = pair(stack, 4096, devices=2, seed=5)
    for host in ("near", "far"):
        for device in range(2):
            fabric.device(host, device).reorder()
    peer = sender.engine.connect(target.engine.address)
    expected = []
    for number in range(300):
        if number % 3 == 0:
            peer.notify("done", b"channel %d" % number)
            expected.append(b"channel %d" % number)
        sender.write(1, b"notice %d" % number)
        expected.append(b"notice %d" % number)
    target.wait_for(len(expected))
    assert target.payloads == expected


def test_a_full_queue_sends_the_message_over_the_channel(stack: ExitStack) -> None:
    _, sender, target = pair(stack, 4096, options={"queue_ops": 1})
    transfers = [sender.engine.prepare_write(sender.local, sender.remote, [[0, 0, 4096]]) for _ in range(50)]
    for number, transfer in enumerate(transfers):
        transfer.post(notify=("done", b"%d" % number))
    for transfer in transfers:
        transfer.wait(DEADLINE_S)
    target.wait_for(50)
    assert sorted(int(payload) for payload in target.payloads) == list(range(50))


def test_a_target_without_room_makes_senders_wait_and_loses_nothing(stack: ExitStack) -> None:
    _, sender, target = pair(stack, 64, options={"notice_room": 2})
    gate = threading.Event()
    target.engine.serve("slow", lambda payload, caller: (gate.wait(DEADLINE_S), None)[1])
    sender.engine.connect(target.engine.address).notify("slow")
    transfers = [sender.engine.prepare_write(sender.local, sender.remote, [[0, 0, 64]]) for _ in range(200)]
    for number, transfer in enumerate(transfers):
        transfer.post(notify=("done", b"%d" % number))
    for transfer in transfers:
        transfer.wait(DEADLINE_S)
    gate.set()
    target.wait_for(200)
    assert sorted(int(payload) for payload in target.payloads) == list(range(200))


def test_many_peers_send_notices_at_once(stack: ExitStack) -> None:
    fabric = stack.enter_context(FakeFabric())
    target = Target(stack, fabric, "far", 4096, options=NOTICES)
    senders = [Sender(stack, fabric, f"near{i}", target, options=NOTICES) for i in range(6)]
    for sender in senders:
        sender.warm_up()
    target.told.clear()

    def send(sender: Sender) -> None:
        for number in range(100):
            sender.write(1, b"%d" % number)

    threads = [threading.Thread(target=send, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    target.wait_for(600)
    for sender in senders:
        own = [payload for payload, caller, _ in target.told if caller.epoch == sender.engine.epoch]
        assert own == [b"%d" % number for number in range(100)]


def test_what_is_no_notice_or_of_nobody_known_is_dropped_and_counted(stack: ExitStack) -> None:
    fabric, sender, target = pair(stack)
    before = target.counter("notices_dropped")
    forged = [
        b"x",
        b"x" * 33,
        bytes(16) + b"\1" + bytes(15) + b"\4\0done",  # a token that nobody was given
        bytes(16) + b"\1" + bytes(15) + b"\xff\xffdone",  # a method longer than the whole
    ]
    for notice in forged:
        fabric.device("far").inject_notice(notice)
    wait_until(lambda: target.counter("notices_dropped") == before + len(forged), "they are dropped")
    sender.write(1)
    target.wait_for(1)
    assert target.payloads == [b"\x01"]


def test_a_peer_that_comes_back_is_not_told_with_the_token_of_its_predecessor(stack: ExitStack) -> None:
    fabric, sender, target = pair(stack)
    target.engine.close()
    again = Target(stack, fabric, "far", 1 << 16, options=NOTICES)
    with pytest.raises(TransferError):
        sender.write(1, deadline_s=2.0)
    fresh = Sender(stack, fabric, "other", again, options=NOTICES)
    fresh.warm_up()
    fresh.write(2)
    again.wait_for(1)
    assert again.payloads == [b"\x02"]
    assert target.payloads == []


def test_a_connection_that_was_closed_sends_no_notices_and_says_so(stack: ExitStack) -> None:
    _, sender, target = pair(stack)
    sender.engine.connect(target.engine.address).close()
    with pytest.raises(PeerUnreachable, match=r"every byte has moved, but .* was not notified"):
        sender.write(1)
    assert target.payloads == []


def test_what_a_sender_was_done_with_arrives_although_it_is_gone(stack: ExitStack) -> None:
    fabric = stack.enter_context(FakeFabric())
    target = Target(stack, fabric, "far", 4096, options=NOTICES)
    lost: list[tuple[int, Caller]] = []
    target.engine.on_peer_lost(lambda caller: lost.append((len(target.told), caller)))
    for round_ in range(1, 6):
        with ExitStack() as short:
            sender = Sender(short, fabric, "near", target, options=NOTICES)
            sender.warm_up()
            sender.write(round_)
        wait_until(lambda: len(lost) == round_, "its end is noticed")  # noqa: B023
        assert target.payloads == [bytes([round_])]
        assert lost[-1][0] == 1, "its end comes after its last message"


def test_a_closed_engine_is_told_nothing(stack: ExitStack) -> None:
    fabric, sender, target = pair(stack)
    fabric.device("near").spoil_notices(delay_s=60.0)
    transfer = sender.post(1)
    wait_until(lambda: transfer.bytes_done == transfer.nbytes, "the bytes move")
    target.engine.close()
    told = len(target.told)
    # The channel says that it has ended, or has not seen it yet.
    with suppress(TransferError):
        transfer.wait(DEADLINE_S)
    assert len(target.told) == told


def test_a_cancelled_write_tells_nothing(stack: ExitStack) -> None:
    fabric, sender, target = pair(stack)
    fabric.device("far").freeze()
    transfer = sender.post(1)
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.wait(DEADLINE_S)
    fabric.device("far").thaw()
    sender.write(2)
    target.wait_for(1)
    assert target.payloads == [b"\x02"]


def test_an_engine_without_such_drivers_hands_out_no_token(stack: ExitStack) -> None:
    fabric = stack.enter_context(FakeFabric())
    target = Target(stack, fabric, "far", 4096)
    sender = Sender(stack, fabric, "near", target, options=NOTICES)
    for value in range(1, 6):
        sender.write(value)
    target.wait_for(5)
    assert (sender.sent, target.counter("notices_received")) == (0, 0)


def test_blocks_of_a_notice_are_written_whole(stack: ExitStack) -> None:
    """Many blocks, far more than one batch of submissions and than the driver's queue holds."""
    _, sender, target = pair(stack, 1 << 20, options={"queue_ops": 40, "in_flight_ops": 64})
    rows = np.array([[i * 256, i * 256, 200] for i in range(4096)], np.uint64)
    bytes_of(sender.local)[:] = 9
    sender.engine.write(sender.local, sender.remote, rows, notify=("done", b"all")).wait(DEADLINE_S)
    target.wait_for(1)
    assert int(bytes_of(target.region).reshape(4096, 256)[:, :200].min()) == 9
