"""What a store tells of itself and of the whole: the calls of a store that only look and listen."""

from __future__ import annotations

from collections.abc import Callable

from mooncake_store import protocol
from mooncake_store.listing import Listing
from mooncake_store.membership import Membership
from mooncake_store.notices import Notices, SegmentChange
from mooncake_store.protocol import StoreReport, StoreStats
from mooncake_store.telemetry import ClientCounters, ClientNumbers

__all__ = ["Observing"]


class Observing:
    """Base of Store."""

    _counters: ClientCounters
    _member: Membership
    _notices: Notices
    _listing: Listing

    def on_evicted(self, handler: Callable[[list[bytes]], None]) -> None:
        """Call ``handler(keys)`` when values that lay in this store's segment, or that it put, have gone.

        Gone means evicted, removed, replaced by somebody else's value elsewhere, or lost with their owner.
        Only keys of this store's tenant are told. The handler runs on a thread of its own, in the master's
        order. What went before a put of this store was committed is told before that put returns; a handler
        must therefore not wait for a lock that is held during a put (such a put goes on after
        ``notice_wait_s``, with a warning).
        """
        self._notices.on_evicted(handler)

    def on_cleared(self, handler: Callable[[], None]) -> None:
        """Call ``handler()`` when this store's segment has lost all it held: the master was lost and found.

        Same thread and order as ``on_evicted``, which is not called for those values.
        """
        self._notices.on_cleared(handler)

    def on_segment_change(self, handler: Callable[[list[SegmentChange]], None]) -> None:
        """Call ``handler(changes)`` for values that come to this store's segment or leave it, of any tenant.

        Same thread and order as ``on_evicted``; a change is told within ``heartbeat_s``. Of a version that
        came before this call nothing is told but that it leaves.
        """
        self._notices.on_change(handler)

    def stats(self) -> StoreStats:
        """Numbers of the whole store."""
        return self._member.ask(protocol.GetStats(), StoreStats)

    def report(self, hot: int = 20) -> StoreReport:
        """Everything that is shown of the whole store, with so many of the most read objects.

        Those of this client's tenant have their keys, which the owners of the memory are asked for.
        """
        report = self._member.ask(protocol.GetReport(hot=hot), StoreReport)
        if report.hot:
            self._listing.named(report.hot)
        return report

    def numbers(self) -> ClientNumbers:
        """What this client has done, and how long it took."""
        return self._counters.numbers()
