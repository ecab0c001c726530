"""Gets: locate under a lease, move, release, for a whole batch at a time."""

from __future__ import annotations

import logging
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mooncake_store import protocol
from mooncake_store._errors import StoreError
from mooncake_store.batch import Batch
from mooncake_store.membership import Membership
from mooncake_store.mover import Layout, LocalMemory, Mover, Uints

__all__ = ["Reading"]

log = logging.getLogger(__name__)


class Reading:
    """One batch being read; a context manager whose body moves the bytes.

    The lease keeps the bytes where they are. Whether it held until the end is known only afterwards: what
    was read is good only where ``good`` says so, after the context has ended.

    Attributes:
        found: which keys have values.
        sizes: of the values, 0 where there is none.
        good: which values were read completely and correctly; set at the end of the context.
    """

    def __init__(self, membership: Membership, mover: Mover, batch: Batch) -> None:
        self._membership = membership
        self._mover = mover
        self._batch = batch
        self._request = protocol.Locate(digests=batch.digests.tobytes())
        self._located: protocol.Located
        self._failed: set[int] = set()
        self.found: npt.NDArray[np.bool_] = np.zeros(len(batch), dtype=np.bool_)
        self.sizes: Uints = np.zeros(len(batch), dtype=np.uint64)
        self.good: npt.NDArray[np.bool_] = np.zeros(len(batch), dtype=np.bool_)

    def fetch(self, memory: LocalMemory, offsets: Uints) -> None:
        """Move every value found to its offset in ``memory``."""
        layout = Layout(self._located.placement, offsets, self._request.epoch)
        self._failed |= self._mover.read(memory, layout).failed

    def __enter__(self) -> Reading:
        self._located = self._membership.ask(self._request, protocol.Located)
        if self._located.lease:
            self._membership.hold(self._located.lease)
        self.found = np.frombuffer(self._located.found, dtype=np.bool_)
        self.sizes = np.frombuffer(self._located.sizes, dtype="<u8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._release()
        except StoreError as problem:
            if error is None:
                raise
            log.debug("a lease was not released, it will expire: %s", problem)

    def _release(self) -> None:
        lease = self._located.lease
        if not lease:
            return
        request = protocol.Release(lease=lease)
        try:
            released = self._membership.conclude(request, self._request.epoch, protocol.Released)
        finally:
            self._membership.let_go(lease)
        if released is None or released.expired:
            return
        good = self.found.copy()
        good[list(self._failed)] = False
        good[np.flatnonzero(self.found)[released.broken]] = False
        self.good = good
