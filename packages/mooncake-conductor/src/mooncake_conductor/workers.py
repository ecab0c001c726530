"""The workers of a cluster: what each is, whether it is up, and how much it has to do. Pure: no sockets, no
clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

from mooncake_conductor._errors import ModelUnknown, NoWorker
from mooncake_conductor.policy.snapshot import Candidate, Role, Snapshot

__all__ = ["State", "Worker", "WorkerInfo", "WorkerRegistry"]

State = Literal["new", "up", "down"]


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about itself at ``GET /worker``. Fields not listed are ignored.

    Attributes:
        epoch: random number, new for every start of the process.
        kv_events: ZMQ address of its live KV events; None when it sends none.
        kv_events_replay: ZMQ address that replays recent ones.
    """

    engine_id: str
    epoch: int
    role: Role
    model: str
    block_tokens: int
    max_model_len: int
    kv_events: str | None = None
    kv_events_replay: str | None = None
    running: int = 0
    waiting: int = 0
    pool_free_blocks: int = 0
    pool_blocks: int = 0


class Worker:
    """One worker, named by its URL.

    Attributes:
        info: its last description, None before the first one.
        state: ``new`` before the first probe ended, then ``up`` or ``down``.
        reason: why it is not up, for people.
        draining: gets no new requests and is forgotten after the last one.
        requests: requests in flight through this conductor.
        queued_tokens: tokens of work in flight through this conductor.
        last_used: number of its last placement.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.info: WorkerInfo | None = None
        self.state: State = "new"
        self.reason = "not probed yet"
        self.answered_at_s: float | None = None
        self.draining = False
        self.requests = 0
        self.queued_tokens = 0
        self.last_used = 0
        self._watchers: dict[object, Callable[[str], None]] = {}

    @property
    def usable(self) -> bool:
        """Whether it may be given a request."""
        return self.state == "up" and not self.draining

    @property
    def described(self) -> WorkerInfo:
        """Its last description, of a worker that has been up."""
        assert self.info is not None, f"worker {self.url} has never answered a probe"
        return self.info

    @contextmanager
    def watched(self, on_lost: Callable[[str], None]) -> Iterator[None]:
        """Inside, ``on_lost(reason)`` is called if the worker goes down or is replaced by another
        incarnation."""
        token = object()
        self._watchers[token] = on_lost
        try:
            yield
        finally:
            self._watchers.pop(token, None)

    def lose(self, reason: str) -> None:
        """Tell everyone who waits for it that the answer will not come."""
        watchers, self._watchers = self._watchers, {}
        for on_lost in watchers.values():
            on_lost(reason)

    def candidate(self, matched_tokens: int = 0) -> Candidate:
        """The worker as a policy sees it."""
        return Candidate(
            url=self.url,
            role=self.described.role,
            matched_tokens=matched_tokens,
            queued_tokens=self.queued_tokens,
            requests=self.requests,
            last_used=self.last_used,
        )


class WorkerRegistry:
    """All workers, by URL, in the order they were added. Not thread-safe.

    ``on_forgotten`` is called with each worker that leaves for good.
    """

    def __init__(self, *, silence_limit_s: float, retry_after_s: float) -> None:
        self._workers: dict[str, Worker] = {}
        self._uses = itertools.count(1)
        self._silence_limit_s = silence_limit_s
        self._retry_after_s = retry_after_s
        self.on_forgotten: Callable[[Worker], None] = lambda worker: None

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, url: str) -> Worker | None:
        """The worker, or None."""
        return self._workers.get(url)

    def add(self, url: str) -> Worker:
        """The worker at this URL, added if it is not known. One that drains is taken back."""
        worker = self._workers.setdefault(url, Worker(url))
        worker.draining = False
        return worker

    def remove(self, url: str) -> Worker | None:
        """Give the worker no more requests, and forget it once it has none. None when it is not known."""
        worker = self._workers.get(url)
        if worker is not None:
            worker.draining = True
            self._forget_if_drained(worker)
        return worker

    def answered(self, worker: Worker, info: WorkerInfo, now_s: float) -> bool:
        """A probe was answered. True when this is another process than before, or the first: what was known
        of its cache is void."""
        started_anew = worker.info is None or worker.info.epoch != info.epoch
        if started_anew and worker.info is not None:
            worker.lose("it restarted")
        worker.info = info
        worker.state, worker.reason, worker.answered_at_s = "up", "", now_s
        return started_anew

    def failed(self, worker: Worker, reason: str, now_s: float, *, gone: bool) -> None:
        """A probe or a request failed. Down at once if the process is ``gone``, else after the silence
        limit."""
        silent_since_s = worker.answered_at_s
        if gone or silent_since_s is None or now_s - silent_since_s >= self._silence_limit_s:
            worker.state, worker.reason = "down", reason
            worker.lose(reason)

    @contextmanager
    def busy(self, worker: Worker, tokens: int) -> Iterator[None]:
        """Inside, the worker has a request of so many tokens to do."""
        worker.requests += 1
        worker.queued_tokens += tokens
        worker.last_used = next(self._uses)
        try:
            yield
        finally:
            worker.requests -= 1
            worker.queued_tokens -= tokens
            self._forget_if_drained(worker)

    def models(self) -> dict[str, WorkerInfo]:
        """Every model that a worker has described, also if that worker is down; by name, with one
        description."""
        return {worker.info.model: worker.info for worker in self if worker.info is not None}

    def of_model(self, model: str) -> list[Worker]:
        """Usable workers of the model. Raises ModelUnknown, or NoWorker when all that serve it are away."""
        known = self.models()
        workers = [worker for worker in self if worker.usable and worker.info and worker.info.model == model]
        if not workers and known and model not in known:
            raise ModelUnknown(
                f"The model {model!r} does not exist; served here are {', '.join(sorted(known))}.",
                code="model_not_found",
                param="model",
            )
        if not workers:
            raise self.none_left("worker", model)
        return workers

    def none_left(self, what: str, model: str) -> NoWorker:
        """The rejection for a model that lacks a usable worker of some kind."""
        away = [f"{worker.url} is {worker.state}: {worker.reason}" for worker in self if not worker.usable]
        reasons = "; ".join(away) or "none is registered"
        return NoWorker(
            f"No {what} for model {model!r} is up ({reasons}). Try again later.",
            code=f"no_{what.replace(' ', '_')}",
            retry_after_s=self._retry_after_s,
        )

    def snapshot(self, model: str, prompt_tokens: int, matched: dict[str, int], avoid: set[str]) -> Snapshot:
        """The usable workers of a model for a policy; those to ``avoid`` only if there are no others.

        Raises ModelUnknown, or NoWorker when prefill or decode has nobody.
        """
        workers = self.of_model(model)
        prefill = _preferred([worker for worker in workers if _can(worker, "prefill")], avoid)
        decode = _preferred([worker for worker in workers if _can(worker, "decode")], avoid)
        if not prefill:
            raise self.none_left("prefill worker", model)
        if not decode:
            raise self.none_left("decode worker", model)
        return Snapshot(
            prompt_tokens=prompt_tokens,
            prefill=tuple(worker.candidate(matched.get(worker.url, 0)) for worker in prefill),
            decode=tuple(worker.candidate() for worker in decode),
        )

    def serving(self) -> bool:
        """Whether at least one model has usable workers for prefill and decode."""
        usable = [worker.info for worker in self if worker.usable and worker.info is not None]
        roles = {(info.model, info.role) for info in usable}
        return any(
            (model, "both") in roles or {(model, "prefill"), (model, "decode")} <= roles for model, _ in roles
        )

    def _forget_if_drained(self, worker: Worker) -> None:
        if worker.draining and worker.requests == 0 and self._workers.get(worker.url) is worker:
            del self._workers[worker.url]
            self.on_forgotten(worker)


def _can(worker: Worker, role: Role) -> bool:
    return worker.info is not None and worker.info.role in (role, "both")


def _preferred(workers: list[Worker], avoid: set[str]) -> list[Worker]:
    return [worker for worker in workers if worker.url not in avoid] or workers
