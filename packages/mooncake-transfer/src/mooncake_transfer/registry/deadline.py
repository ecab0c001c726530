"""Ends every question to a registry at its deadline, whatever the server does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from mooncake_transfer._errors import RegistryUnavailable
from mooncake_transfer.registry.contract import Interruptible, Registry

__all__ = ["TimedRegistry"]

# Entries that may be listed, renewed or removed within one ``timeout_s``.
ENTRIES_PER_TIMEOUT = 500

Result = TypeVar("Result")


class TimedRegistry:
    """A ``Registry`` whose calls end after ``timeout_s``: each runs on a thread that is left then.

    Libraries limit the wait for each byte only, so a server that sends one now and then would hold them for
    as long as it likes. A client whose question was left is interrupted, if it can be, and not used again.
    """

    def __init__(self, open_client: Callable[[], Registry], timeout_s: float) -> None:
        """``open_client`` makes as many as there are questions at once; the first one now."""
        self._open_client = open_client
        self._timeout_s = timeout_s
        self._end_s = math.inf
        self._lock = threading.Lock()
        self._closed = False
        self._idle = [open_client()]
        self._busy: dict[Future[Any], Registry] = {}
        self.where = self._idle[0].where

    def get(self, key: str, timeout_s: float = math.inf) -> bytes | None:
        """As ``Registry.get``, in no more than ``timeout_s``."""
        return self._ask(lambda client: client.get(key), min(timeout_s, self._timeout_s))

    def list(self, prefix: str) -> dict[str, bytes]:
        """As ``Registry.list``."""
        return self._ask(lambda client: client.list(prefix), self._timeout_s)

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        """As ``Registry.replace``."""
        return self._ask(lambda client: client.replace(key, old, new, ttl_s), self._timeout_s)

    def renew(self, entries: Mapping[str, bytes], ttl_s: float) -> set[str]:
        """As ``Registry.renew``; many entries have a multiple of the time."""
        return self._ask(lambda client: client.renew(entries, ttl_s), self._bulk_s(entries))

    def remove(self, entries: Mapping[str, bytes]) -> None:
        """As ``Registry.remove``; many entries have a multiple of the time."""
        self._ask(lambda client: client.remove(entries), self._bulk_s(entries))

    def end_within(self, timeout_s: float) -> None:
        """Let no question, of those that begin from now on, last longer than until then."""
        self._end_s = time.monotonic() + timeout_s

    def close(self) -> None:
        """As ``Registry.close``; questions in progress are given up."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for client in idle:
            client.close()
        for answer in busy:
            self._give_up(answer)

    def _bulk_s(self, entries: Mapping[str, bytes]) -> float:
        return self._timeout_s * max(1, math.ceil(len(entries) / ENTRIES_PER_TIMEOUT))

    def _ask(self, question: Callable[[Registry], Result], limit_s: float) -> Result:
        limit_s = max(min(limit_s, self._end_s - time.monotonic()), 0.0)
        deadline_s = time.monotonic() + limit_s
        if self._closed or limit_s <= 0:
            raise self._no_answer(limit_s)
        with self._lock:
            client = self._idle.pop() if self._idle else None
        if client is None:
            client = self._open_client()
        answer: Future[Result] = Future()
        with self._lock:
            self._busy[answer] = client
        # A daemon: one that waits for the resolver or a plugin must not keep the interpreter.
        thread = threading.Thread(
            target=self._run, args=(client, question, answer), name="mooncake-registry", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # An interpreter that ends makes no threads. Only an announcer says goodbye then, on its own
            # thread, and who waits for that has a deadline.
            self._run(client, question, answer)
        try:
            return answer.result(max(deadline_s - time.monotonic(), 0.0))
        except NotYet:
            if answer.done():  # in this very moment, or it is the question's own
                return answer.result()
            self._give_up(answer)
            raise self._no_answer(limit_s) from None

    def _run(self, client: Registry, question: Callable[[Registry], Result], answer: Future[Result]) -> None:
        error: BaseException | None = None
        try:
            result = question(client)
        except BaseException as raised:  # noqa: BLE001 - who asked raises it, whatever it is
            error = raised
        with self._lock:
            wanted = self._busy.pop(answer, None) is not None
            keep = wanted and not self._closed
            if keep:
                self._idle.append(client)
        if not keep:
            client.close()
        if not wanted:
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _give_up(self, answer: Future[Any]) -> None:
        with self._lock:
            client = self._busy.pop(answer, None)
        if client is None:
            return
        if isinstance(client, Interruptible):
            client.interrupt()
        if self._closed:
            answer.set_exception(self._no_answer(0.0))

    def _no_answer(self, limit_s: float) -> RegistryUnavailable:
        why = "it was closed" if self._closed else f"no answer within {limit_s:.3g} s"
        return RegistryUnavailable(
            f"registry {self.where} cannot be used ({why}); check that it runs and is not overloaded"
        )
