"""The publisher speaks vLLM's wire: a numbered live stream, and a ring that can be replayed."""

import threading

import pytest
import zmq

from mooncake_store.errors import ConfigError, PublisherClosed
from mooncake_store.kv_events.publisher import KVEventPublisher
from mooncake_store.kv_events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    decode_batch,
    decode_sequence,
    encode_sequence,
)

TIMEOUT_MS = 5000


@pytest.fixture
def connect():
    """Connects sockets of a kind to an endpoint, and closes them after the test."""
    context = zmq.Context()
    sockets = []

    def connected(kind: int, endpoint: str) -> zmq.Socket:
        socket = context.socket(kind)
        sockets.append(socket)
        socket.set_hwm(0)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        return socket

    yield connected
    context.destroy(linger=0)


def replayed(connect, publisher: KVEventPublisher, first: int) -> list[tuple[int, bytes]]:
    socket = connect(zmq.DEALER, publisher.replay_endpoint)
    socket.send_multipart((b"", encode_sequence(first)))
    batches = []
    while True:
        empty, frame, payload = socket.recv_multipart()
        assert empty == b""
        if decode_sequence(frame) < 0:
            assert payload == b""
            return batches
        batches.append((decode_sequence(frame), payload))


def removed(name: int) -> list[BlockRemoved]:
    return [BlockRemoved(block_hashes=[name])]


def test_live_messages_have_topic_number_and_batch(connect) -> None:
    with KVEventPublisher(topic="kv", data_parallel_rank=2) as publisher:
        live = connect(zmq.SUB, publisher.endpoint)
        sequence = -1
        while not live.poll(10):  # until the subscription has reached the publisher
            sequence = publisher.publish([AllBlocksCleared()])
            assert sequence < 1000
        topic, frame, payload = live.recv_multipart()
        assert topic == b"kv"
        assert 0 <= decode_sequence(frame) <= sequence
        batch = decode_batch(payload)
        assert (batch.events, batch.data_parallel_rank) == ([AllBlocksCleared()], 2)


def test_a_replay_has_every_batch_from_the_number_asked_for_and_an_end(connect) -> None:
    with KVEventPublisher() as publisher:
        assert [publisher.publish(removed(name)) for name in range(5)] == [0, 1, 2, 3, 4]
        batches = replayed(connect, publisher, 2)
        assert [sequence for sequence, _ in batches] == [2, 3, 4]
        assert [decode_batch(payload).events for _, payload in batches] == [
            removed(2),
            removed(3),
            removed(4),
        ]
        assert replayed(connect, publisher, 5) == []


def test_the_ring_keeps_the_newest_batches_only(connect) -> None:
    with KVEventPublisher(ring_batches=3) as publisher:
        for name in range(10):
            publisher.publish(removed(name))
        assert [sequence for sequence, _ in replayed(connect, publisher, 0)] == [7, 8, 9]


def test_a_whole_ring_of_ten_thousand_batches_is_replayed(connect) -> None:
    with KVEventPublisher() as publisher:
        for name in range(10_001):
            publisher.publish(removed(name))
        sequences = [sequence for sequence, _ in replayed(connect, publisher, 0)]
        assert sequences == list(range(1, 10_001))


def test_a_request_that_is_none_is_passed_over(connect) -> None:
    with KVEventPublisher() as publisher:
        socket = connect(zmq.DEALER, publisher.replay_endpoint)
        for request in ([b"x"], [b"", b"short"], [b"", encode_sequence(-1)], [b"", b"", encode_sequence(0)]):
            socket.send_multipart(request)
        publisher.publish(removed(1))
        assert len(replayed(connect, publisher, 0)) == 1


def test_batches_of_many_threads_are_numbered_without_a_gap(connect) -> None:
    with KVEventPublisher() as publisher:
        threads = [
            threading.Thread(target=lambda: [publisher.publish(removed(n)) for n in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert [sequence for sequence, _ in replayed(connect, publisher, 0)] == list(range(800))


def test_a_closed_publisher_has_no_thread_and_takes_no_events() -> None:
    publisher = KVEventPublisher()
    publisher.close()
    publisher.close()
    assert "kv-events" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(PublisherClosed):
        publisher.publish([AllBlocksCleared()])


def test_what_was_published_just_before_the_close_still_goes_out(connect) -> None:
    publisher = KVEventPublisher()
    live = connect(zmq.SUB, publisher.endpoint)
    while not live.poll(10):
        publisher.publish([AllBlocksCleared()])
    last = publisher.publish(removed(9))
    publisher.close()
    received = -1
    while received < last:
        received = decode_sequence(live.recv_multipart()[1])
    assert received == last


def test_a_taken_address_is_refused() -> None:
    with KVEventPublisher() as publisher, pytest.raises(ConfigError, match="cannot be published at tcp"):
        KVEventPublisher(publisher.endpoint)


def test_both_sockets_bind_ipv6_addresses() -> None:
    with KVEventPublisher("tcp://[::1]:0", "tcp://[::1]:*") as publisher:
        assert publisher.endpoint.startswith("tcp://[::1]:")
        assert publisher.replay_endpoint.startswith("tcp://[::1]:")
