"""Hands what the core has to tell to the log, and what it wants done to who does it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from mooncake_transfer._core import Engine as CoreEngine
from mooncake_transfer._scarce import start_thread

JOIN_S = 5.0
POLL_S = 1.0

log = logging.getLogger("mooncake_transfer.rails")

LEVELS = {
    "rail failed": logging.WARNING,
    "rail unused": logging.INFO,
    "breaker opened": logging.ERROR,
    "rail recovered": logging.INFO,
    "driver fault": logging.ERROR,
}


class NoticeReader:
    """One thread. Log records carry ``event``, ``peer``, ``rail`` and ``region`` as attributes.

    Each reason of a rail is logged once, not for every slice it affects.
    """

    def __init__(self, core: CoreEngine, held: Callable[[int], None], fence: Callable[[str, int], None]):
        self._core = core
        self._held = held
        self._fence = fence
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises TransferError when there is none left."""
        thread = threading.Thread(target=self._run, name="mooncake-notices", daemon=True)
        start_thread(thread)
        self._thread = thread

    def stop(self) -> None:
        """End the thread; the core is closed already, which wakes it."""
        self._stopping = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stopping:
            notice = self._core.next_notice(POLL_S)
            if notice is None:
                continue
            try:
                self._take(*notice)
            except BaseException:  # nobody waits for it, and what comes next must be done all the same
                kind, peer, *_ = notice
                log.exception("handling %s of %s failed", kind, peer, extra={"event": kind, "peer": peer})

    def _take(self, kind: str, peer: str, rail: str, region: str, text: str, token: int) -> None:
        if kind == "held":
            self._held(token)
        elif kind == "fence":
            self._fence(peer, token)
        else:
            log.log(
                LEVELS[kind],
                "%s: %s%s%s%s",
                kind,
                rail,
                f" to {peer}" if peer else "",
                f", region {region!r}" if region else "",
                f": {text}" if text else "",
                extra={"event": kind, "peer": peer, "rail": rail, "region": region},
            )
