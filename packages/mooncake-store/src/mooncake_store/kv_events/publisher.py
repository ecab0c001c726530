"""Publishes KV events the way vLLM does: a PUB socket for the live stream, a ROUTER socket to replay recent
batches."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import zmq

from mooncake_store._errors import ConfigError, EventMalformed, PublisherClosed
from mooncake_store.kv_events.wire import Event, EventBatch, decode_sequence, encode_batch, encode_sequence

__all__ = ["ANY_LOCAL_PORT", "KVEventPublisher"]

ANY_LOCAL_PORT = "tcp://127.0.0.1:*"
REPLAY_BATCHES = 10_000
LIVE_QUEUE_BATCHES = 100_000
END_OF_REPLAY = -1
FLUSH_MS = 500
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class KVEventPublisher:
    """Sends event batches, numbered from zero, to whoever subscribes. Thread-safe; has one thread of its own.

    ``publish`` never waits for a network: the ring of recent batches is also the queue to the sending thread.
    A sender that falls more than the ring behind, or a subscriber that does, skips batches; the numbers show
    the gap.

    Attributes:
        endpoint: address of the live stream, with the real port.
        replay_endpoint: address that answers ``[b"", first sequence]`` with every batch from there that is
            still in the ring, as ``[b"", sequence, payload]``, and then sequence -1 with an empty payload.
    """

    def __init__(
        self,
        endpoint: str = ANY_LOCAL_PORT,
        replay_endpoint: str = ANY_LOCAL_PORT,
        *,
        topic: str = "",
        ring_batches: int = REPLAY_BATCHES,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Bind both sockets and start. Raises ConfigError when an address cannot be had."""
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring_batches)
        self._next_sequence = 0
        self._lock = threading.Lock()
        self._closing = False
        self._context = zmq.Context()
        try:
            self._live = self._bind(zmq.PUB, endpoint, LIVE_QUEUE_BATCHES)
            # A replay is sent in one go: the queue must hold the whole ring, or ROUTER drops the rest of it.
            self._replay = self._bind(zmq.ROUTER, replay_endpoint, 2 * ring_batches + 2)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._live.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[Event]) -> int:
        """Send one batch; returns its sequence number. Raises PublisherClosed after ``close``."""
        payload = encode_batch(EventBatch(time.time(), list(events), self._rank))
        with self._lock:
            if self._closing:
                raise PublisherClosed(
                    "this KV event publisher is closed; create another one for a new stream"
                )
            sequence = self._next_sequence
            self._next_sequence += 1
            self._ring.append((sequence, payload))
            self._wake()
        return sequence

    def close(self) -> None:
        """Send what is queued and stop. Takes at most 5 s. Safe to call twice."""
        with self._lock:
            already = self._closing
            self._closing = True
            if not already:
                self._wake()
        self._thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind(self, kind: int, endpoint: str, queue_batches: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(queue_batches)
        socket.ipv6 = "[" in endpoint  # ZeroMQ takes such addresses only when told
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"KV events cannot be published at {endpoint}: {error}; use {ANY_LOCAL_PORT} for a free port"
            ) from error
        return socket

    def _wake(self) -> None:
        # A full pipe means that the thread has wake-ups enough waiting for it.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        sent = 0
        try:
            while True:
                ready = dict(poller.poll(1000))
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                closing = self._closing
                sent = self._send_from(sent)
                if self._replay in ready:
                    self._answer_replay()
                if closing:
                    return
        except Exception:
            # The end of a thread: nobody above could report it.
            log.exception("the KV event publisher at %s stopped", self.endpoint)
            self._closing = True
        finally:
            self._context.destroy(linger=FLUSH_MS)
            with self._lock:
                self._closing = True
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _send_from(self, first: int) -> int:
        with self._lock:
            behind = min(self._next_sequence - first, len(self._ring))
            batches = [self._ring[index] for index in range(-behind, 0)]
            following = self._next_sequence
        for sequence, payload in batches:
            self._live.send_multipart((self._topic, encode_sequence(sequence), payload))
        return following

    def _answer_replay(self) -> None:
        client, *request = self._replay.recv_multipart()
        try:
            first = decode_sequence(request[1]) if len(request) == 2 else None
        except EventMalformed:
            first = None
        if first is None or first < 0:
            log.warning("a replay request of %d frames is not [empty, sequence]; ignored", len(request))
            return
        with self._lock:
            batches = [(sequence, payload) for sequence, payload in self._ring if sequence >= first]
        for sequence, payload in batches:
            self._replay.send_multipart((client, b"", encode_sequence(sequence), payload))
        self._replay.send_multipart((client, b"", encode_sequence(END_OF_REPLAY), b""))
