"""Following a publisher: every batch once and in order, or the news that some are lost."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from mooncake_conductor.subscriber import EventSubscriber, reachable_endpoint
from mooncake_store.errors import EventMalformed
from mooncake_store.kv_events.publisher import KVEventPublisher
from mooncake_store.kv_events.wire import BlockRemoved, EventBatch, encode_batch, encode_sequence

TIMEOUT_S = 30.0


class RecordingSink:
    def __init__(self) -> None:
        self.names: list[int] = []
        self.gaps = 0
        self.losses: list[str] = []

    def on_batch(self, batch: EventBatch) -> None:
        if batch.events[0].block_hashes == [666]:
            raise EventMalformed("contradicts itself")
        self.names += [event.block_hashes[0] for event in batch.events]

    def on_gap(self) -> None:
        self.gaps += 1

    def on_lost(self, reason: str) -> None:
        self.losses.append(reason)
        self.names.clear()


class LiveSocket:
    """The live half of a publisher, which sends what and when the test says."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def subscribed(self) -> None:
        assert await asyncio.wait_for(self._socket.recv(), TIMEOUT_S) == b"\x01"

    async def send(self, sequence: int, name: int) -> None:
        await self.send_raw((b"", encode_sequence(sequence), payload(name)))

    async def send_raw(self, frames) -> None:
        await self._socket.send_multipart(frames)


def removed(name: int) -> list[BlockRemoved]:
    return [BlockRemoved(block_hashes=[name])]


def payload(name: int) -> bytes:
    return encode_batch(EventBatch(0.0, removed(name)))


async def until(condition, what: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"it is still not so that {what}"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def following(
    endpoint: str, replay: str | None, *, interval_s: float = 60.0, timeout_s: float = 5.0
) -> AsyncIterator[RecordingSink]:
    sink = RecordingSink()
    context = zmq.asyncio.Context()
    subscriber = EventSubscriber(
        context, endpoint, replay, sink, replay_timeout_s=timeout_s, replay_interval_s=interval_s
    )
    task = asyncio.create_task(subscriber.run())
    try:
        yield sink
        assert not task.done(), "the subscriber ended by itself"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def live_socket() -> AsyncIterator[LiveSocket]:
    context = zmq.asyncio.Context()
    try:
        yield LiveSocket(context)
    finally:
        context.destroy(linger=0)


def test_batches_from_before_and_after_the_subscription_come_once_and_in_order() -> None:
    async def scenario() -> None:
        with KVEventPublisher() as publisher:
            for name in range(50):
                publisher.publish(removed(name))
            async with following(publisher.endpoint, publisher.replay_endpoint, interval_s=0.05) as sink:
                for name in range(50, 100):
                    publisher.publish(removed(name))
                    await asyncio.sleep(0)
                await until(lambda: len(sink.names) >= 100, "all batches came")
                assert sink.names == list(range(100))
                assert (sink.gaps, sink.losses) == (0, [])

    asyncio.run(scenario())


def test_a_skipped_batch_is_fetched_by_replay() -> None:
    async def scenario() -> None:
        async with live_socket() as live:
            with KVEventPublisher() as publisher:
                async with following(live.endpoint, publisher.replay_endpoint) as sink:
                    await live.subscribed()
                    await live.send(0, 10)
                    await until(lambda: sink.names == [10], "the first batch came")
                    for name in (10, 11, 12):  # the ring has what the live stream leaves out
                        publisher.publish(removed(name))
                    await live.send(3, 13)
                    await until(lambda: sink.names == [10, 11, 12, 13], "the gap is filled")
                    assert (sink.gaps, sink.losses) == (1, [])

    asyncio.run(scenario())


@pytest.mark.parametrize("replay", [None, "tcp://127.0.0.1:9"], ids=["none", "dead"])
def test_a_gap_nobody_can_fill_loses_the_view_and_the_stream_goes_on(replay: str | None) -> None:
    async def scenario() -> None:
        async with live_socket() as live, following(live.endpoint, replay, timeout_s=0.5) as sink:
            await live.subscribed()
            await live.send(7, 1)  # the first number seen: nothing known is lost
            await live.send(8, 2)
            await until(lambda: sink.names == [1, 2], "both came")
            await live.send(20, 3)
            await live.send(21, 4)
            await until(lambda: sink.names == [3, 4], "the later ones came")
            assert (sink.gaps, sink.losses) == (1, ["gap"])

    asyncio.run(scenario())


def test_a_gap_older_than_the_ring_loses_the_view() -> None:
    async def scenario() -> None:
        async with live_socket() as live:
            with KVEventPublisher(ring_batches=2) as publisher:
                async with following(live.endpoint, publisher.replay_endpoint) as sink:
                    await live.subscribed()
                    await live.send(0, 0)
                    await until(lambda: sink.names == [0], "the first came")
                    for name in range(6):
                        publisher.publish(removed(name))
                    await live.send(6, 6)
                    await until(lambda: sink.names == [4, 5, 6], "what is left of the ring came")
                    assert (sink.gaps, sink.losses) == (1, ["gap"])

    asyncio.run(scenario())


def test_a_publisher_that_starts_anew_loses_the_view() -> None:
    async def scenario() -> None:
        async with live_socket() as live, following(live.endpoint, None) as sink:
            await live.subscribed()
            for sequence in range(3):
                await live.send(sequence, sequence)
            await live.send(1, 1)  # a duplicate: the same bytes under the same number
            await live.send(0, 100)
            await live.send(1, 101)
            await until(lambda: sink.names == [100, 101], "the new stream came")
            assert sink.losses == ["restart"]

    asyncio.run(scenario())


def test_a_restart_is_caught_up_by_replay() -> None:
    async def scenario() -> None:
        async with live_socket() as live:
            with KVEventPublisher() as old:
                for name in range(5):
                    old.publish(removed(name))
                port = old.replay_endpoint
                async with following(live.endpoint, port, interval_s=0.05) as sink:
                    await live.subscribed()
                    await until(lambda: len(sink.names) == 5, "the old stream came")
                    old.close()
                    with KVEventPublisher(replay_endpoint=port) as new:
                        new.publish(removed(100))
                        new.publish(removed(101))
                        await live.send(2, 102)
                        await until(lambda: sink.names == [100, 101, 102], "the new stream came whole")
                        assert sink.losses == ["restart"]

    asyncio.run(scenario())


def test_a_batch_the_live_stream_never_showed_comes_by_a_later_question() -> None:
    async def scenario() -> None:
        async with live_socket() as live:
            with KVEventPublisher() as publisher:
                async with following(live.endpoint, publisher.replay_endpoint, interval_s=0.05) as sink:
                    await live.subscribed()
                    publisher.publish(removed(1))
                    await until(lambda: sink.names == [1], "it came by replay")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "frames",
    [
        (b"", encode_sequence(1), b"\xc1"),
        (b"", encode_sequence(1), payload(666)),
        (b"", b"short", payload(1)),
        (b"", payload(1)),
    ],
    ids=["no msgpack", "refused by the sink", "no number", "no frame"],
)
def test_a_malformed_message_loses_the_view_and_the_stream_goes_on(frames) -> None:
    async def scenario() -> None:
        async with live_socket() as live, following(live.endpoint, None) as sink:
            await live.subscribed()
            await live.send(0, 0)
            await until(lambda: sink.names == [0], "the first came")
            await live.send_raw(frames)
            await live.send(2, 2)
            await until(lambda: sink.names == [2], "the next came")
            assert sink.losses[0] == "malformed"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        (None, None),
        ("tcp://*:5557", "tcp://h:5557"),
        ("tcp://0.0.0.0:5557", "tcp://h:5557"),
        ("tcp://[::0]:5557", "tcp://h:5557"),
        ("tcp://:5557", "tcp://:5557"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("ipc:///tmp/events", "ipc:///tmp/events"),
    ],
)
def test_an_address_on_every_interface_is_at_the_host_of_the_worker(endpoint, expected) -> None:
    assert reachable_endpoint(endpoint, "http://h:8100") == expected


def test_a_worker_at_an_ipv6_address_keeps_its_brackets() -> None:
    assert reachable_endpoint("tcp://[::]:5557", "http://[::1]:8100") == "tcp://[::1]:5557"


def test_a_live_stream_at_an_ipv6_address_is_followed() -> None:
    async def scenario() -> None:
        with KVEventPublisher("tcp://[::1]:0") as publisher:
            names = itertools.count()

            def comes() -> bool:
                publisher.publish(removed(next(names)))  # until the subscription has reached the publisher
                return bool(sink.names)

            async with following(publisher.endpoint, None) as sink:
                await until(comes, "a batch came")

    asyncio.run(scenario())


def test_a_replay_at_an_ipv6_address_is_asked() -> None:
    async def scenario() -> None:
        with KVEventPublisher(replay_endpoint="tcp://[::1]:0") as publisher:
            publisher.publish(removed(7))
            async with live_socket() as silent, following(silent.endpoint, publisher.replay_endpoint) as sink:
                await until(lambda: sink.names == [7], "the batch of before came")

    asyncio.run(scenario())
