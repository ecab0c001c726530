"""One thread that tells when transfers are done, for callers that neither wait nor have an event loop."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping

from mooncake_transfer import _core
from mooncake_transfer._errors import EngineClosed

JOIN_S = 5.0
POLL_S = 1.0

log = logging.getLogger(__name__)


class Watcher:
    """Calls back when transfers end. The thread starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._callbacks: dict[int, tuple[Callable[[], None], Mapping[str, str]]] = {}
        self._stopping = False

    def watch(self, transfer: _core.Transfer, ended: Callable[[], None], fields: Mapping[str, str]) -> None:
        """Call ``ended()`` on the watcher's thread once the transfer is done; ``fields``: of its log lines.

        Raises EngineClosed after ``stop()``, and what the transfer says when it cannot be watched.
        """
        with self._lock:
            if self._stopping:
                raise EngineClosed("the engine has been closed, and watches no transfers any more")
            signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            if self._epoll is None:
                self._epoll = select.epoll()
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._epoll.register(self._wake, select.EPOLLIN)
                self._thread = threading.Thread(
                    target=self._run, args=(self._epoll,), name="mooncake-watcher", daemon=True
                )
                self._thread.start()
            self._callbacks[signal] = (ended, fields)
            self._epoll.register(signal, select.EPOLLIN)
        try:
            transfer.signal_when_done(signal)
        except BaseException:
            self._forget(signal)
            raise

    def _forget(self, signal: int) -> None:
        with self._lock:
            if self._callbacks.pop(signal, None) is not None and self._epoll is not None:
                self._epoll.unregister(signal)
                os.close(signal)

    def stop(self) -> None:
        """End the thread. The engine is closed already, so everything that was watched has ended."""
        with self._lock:
            self._stopping = True
            thread = self._thread
            if thread is not None:
                os.eventfd_write(self._wake, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)

    def _run(self, epoll: select.epoll) -> None:
        while True:
            ready = [signal for signal, _ in epoll.poll(POLL_S) if signal != self._wake]
            for signal in ready:
                self._end(epoll, signal)
            with self._lock:
                if self._stopping and not self._callbacks:
                    break
                if self._stopping and not ready:
                    log.warning("%d watched transfers never ended", len(self._callbacks))
                    for signal in self._callbacks:
                        os.close(signal)
                    self._callbacks.clear()
                    break
        os.close(self._wake)
        epoll.close()

    def _end(self, epoll: select.epoll, signal: int) -> None:
        with self._lock:
            ended, fields = self._callbacks.pop(signal)
        epoll.unregister(signal)
        os.close(signal)
        try:
            ended()
        except BaseException:  # the callback's failure must not end the thread that others rely on
            peer = fields.get("peer", "")
            log.exception("a callback at the end of a transfer with %s failed", peer, extra=dict(fields))
