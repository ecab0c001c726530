"""Follows one worker's KV events: the live stream, replays of what was missed, and restarts of the
publisher."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Literal, Protocol
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from mooncake_conductor.sequence import SequenceTracker, Verdict
from mooncake_store.errors import EventMalformed
from mooncake_store.kv_events.wire import EventBatch, decode_batch, decode_sequence, encode_sequence
from mooncake_transfer.listening import is_wildcard, join_address

__all__ = ["EventSink", "EventSubscriber", "reachable_endpoint"]

LIVE_QUEUE_BATCHES = 100_000
# The subscription takes a moment to reach the publisher, and what is published in between goes to nobody; so
# the first question for missed batches comes soon, the later ones at the configured interval.
SETTLE_S = 0.25

log = logging.getLogger(__name__)

LossReason = Literal["gap", "restart", "malformed"]


class EventSink(Protocol):
    """Where a subscriber brings what it hears."""

    def on_batch(self, batch: EventBatch) -> None:
        """The next batch, each once and in order. May raise EventMalformed."""

    def on_gap(self) -> None:
        """The live stream skipped batches; they may come by replay yet."""

    def on_lost(self, reason: LossReason) -> None:
        """Batches are lost for good: what was known of the worker must be forgotten."""


class EventSubscriber:
    """Brings every batch of one publisher to a sink, exactly once and in order, or says that some are lost.

    ``run`` goes on until it is cancelled. Every wait has a limit, and a publisher that is away is no error.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        replay_endpoint: str | None,
        sink: EventSink,
        *,
        replay_timeout_s: float,
        replay_interval_s: float,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._sink = sink
        self._replay_timeout_s = replay_timeout_s
        self._replay_interval_s = replay_interval_s
        self._tracker = SequenceTracker()

    async def run(self) -> None:
        """Subscribe, catch up, and follow."""
        live = self._context.socket(zmq.SUB)
        try:
            live.set_hwm(LIVE_QUEUE_BATCHES)
            live.setsockopt(zmq.LINGER, 0)
            live.subscribe(b"")
            live.ipv6 = "[" in self._endpoint  # ZeroMQ takes such addresses only when told
            live.connect(self._endpoint)
            await self._follow(live)
        finally:
            live.close()

    async def _follow(self, live: zmq.asyncio.Socket) -> None:
        loop = asyncio.get_running_loop()
        await self._catch_up()
        catch_up_at_s = loop.time() + SETTLE_S
        while True:
            left_s = catch_up_at_s - loop.time()
            if left_s > 0 and await live.poll(math.ceil(left_s * 1000)):
                await self._on_live(await live.recv_multipart())
            elif left_s <= 0:
                await self._catch_up()
                catch_up_at_s = loop.time() + self._replay_interval_s

    async def _on_live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            log.warning("%s sent a message that is no KV event (%d frames)", self._endpoint, len(frames))
            self._lost("malformed")
            return
        sequence, payload = decode_sequence(frames[1]), frames[2]
        verdict = self._tracker.judge(sequence, payload)
        if verdict is Verdict.RESTART:
            self._lost("restart")
            self._tracker.restart()
        elif verdict is Verdict.GAP and self._tracker.joined:
            log.info(
                "%s skipped from KV event batch %d to %d", self._endpoint, self._tracker.expected, sequence
            )
            self._sink.on_gap()
        if verdict in (Verdict.RESTART, Verdict.GAP):
            await self._catch_up()
        self._take(sequence, payload)

    async def _catch_up(self) -> None:
        """Ask for every batch from the next expected one, and take in what comes."""
        if self._replay_endpoint is None:
            return
        # A new socket for each question, so that late answers to an old one cannot be taken for this one's.
        replay = self._context.socket(zmq.DEALER)
        try:
            replay.set_hwm(LIVE_QUEUE_BATCHES)
            replay.setsockopt(zmq.LINGER, 0)
            replay.ipv6 = "[" in self._replay_endpoint
            replay.connect(self._replay_endpoint)
            await replay.send_multipart((b"", encode_sequence(self._tracker.expected)))
            while await replay.poll(math.ceil(self._replay_timeout_s * 1000)):
                frames = await replay.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    break
                sequence = decode_sequence(frames[1])
                if sequence < 0:
                    return
                self._take(sequence, frames[2])
        finally:
            replay.close()
        log.debug("%s did not finish a replay", self._replay_endpoint)

    def _take(self, sequence: int, payload: bytes) -> None:
        """Bring a batch to the sink unless it was there before. Batches that are still missing are lost
        now."""
        verdict = self._tracker.judge(sequence, payload)
        if verdict is Verdict.DUPLICATE:
            return
        if verdict is Verdict.RESTART:
            self._lost("restart")
            self._tracker.restart()
        elif verdict is Verdict.GAP and self._tracker.joined:
            self._lost("gap")
        self._tracker.advance(sequence, payload)
        try:
            self._sink.on_batch(decode_batch(payload))
        except EventMalformed as error:
            log.warning("%s, batch %d: %s", self._endpoint, sequence, error)
            self._lost("malformed")

    def _lost(self, reason: LossReason) -> None:
        log.warning("KV events of %s are lost (%s); its view starts anew", self._endpoint, reason)
        self._sink.on_lost(reason)


def reachable_endpoint(endpoint: str | None, worker: str) -> str | None:
    """A ZMQ address as seen from here: a worker that binds to every interface is at the host of its URL."""
    if endpoint is None:
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    everywhere = host == "*" or (host and is_wildcard(host.removeprefix("[").removesuffix("]")))
    if everywhere and endpoint.startswith("tcp://") and port.isdecimal():
        return f"tcp://{join_address(str(urlsplit(worker).hostname), int(port))}"
    return endpoint
