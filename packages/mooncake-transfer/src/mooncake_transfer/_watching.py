"""One thread that tells when transfers are done, for callers that neither wait nor have an event loop."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from mooncake_transfer import _core
from mooncake_transfer._errors import EngineClosed
from mooncake_transfer._scarce import none_left, start_thread

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

        Raises EngineClosed after ``stop()``, TransferError when no descriptor or thread is left, and what the
        transfer says when it cannot be watched.
        """
        with self._lock:
            if self._stopping:
                raise EngineClosed("the engine has been closed, and watches no transfers any more")
            try:
                epoll = self._epoll or self._begin()
                signal = _watched(epoll)
            except OSError as error:
                raise none_left("a transfer to watch", error) from error
            self._callbacks[signal] = (ended, fields)
        try:
            transfer.signal_when_done(signal)
        except BaseException:
            self._forget(signal)
            raise

    def _begin(self) -> select.epoll:
        """Start the thread; it is there as a whole or not at all."""
        with ExitStack() as undo:
            epoll = select.epoll()
            undo.callback(epoll.close)
            wake = _watched(epoll)
            undo.callback(os.close, wake)
            thread = threading.Thread(
                target=self._run, args=(epoll, wake), name="mooncake-watcher", daemon=True
            )
            start_thread(thread)
            undo.pop_all()
        self._epoll, self._wake, self._thread = epoll, wake, thread
        return epoll

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

    def _run(self, epoll: select.epoll, wake: int) -> None:
        while True:
            ready = [signal for signal, _ in epoll.poll(POLL_S) if signal != wake]
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
        os.close(wake)
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


def _watched(epoll: select.epoll) -> int:
    """A new eventfd that ``epoll`` tells of. Raises OSError."""
    signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        epoll.register(signal, select.EPOLLIN)
    except BaseException:
        os.close(signal)
        raise
    return signal
