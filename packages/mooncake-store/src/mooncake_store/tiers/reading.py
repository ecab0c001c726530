"""Reading values that lie in tiers only: their owners stage them, and they move like all others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from mooncake_store import protocol
from mooncake_store._errors import TierError
from mooncake_store.checksums import crosses_network, may_compare
from mooncake_store.mover import LocalMemory
from mooncake_store.parts import Uints
from mooncake_store.protocol import tiers
from mooncake_store.time_budget import TimeBudget
from mooncake_transfer import RemoteRegion, TransferEngine
from mooncake_transfer.errors import (
    CallTimeout,
    MemoryInUse,
    PeerUnreachable,
    TransferError,
    TransferTimeout,
)

if TYPE_CHECKING:
    from mooncake_store.tiers.owner import TierOwner

__all__ = ["TierClient", "TierReading"]

KNOWN_REGIONS = 64

log = logging.getLogger(__name__)


class TierClient:
    """How a store reaches the owners of tiers, itself among them. Thread-safe."""

    def __init__(self, engine: TransferEngine, client: int, call_timeout_s: float) -> None:
        self.engine = engine
        self.client = client
        self.own: TierOwner | None = None
        self._call_timeout_s = call_timeout_s
        self._lock = threading.Lock()
        self._regions: dict[bytes, RemoteRegion] = {}

    def ask(
        self, owner: tuple[int, str], request: tiers.Stage | tiers.Unstage, deadline_s: float
    ) -> tiers.Stage | tiers.Unstage | tiers.Staged | tiers.Unstaged:
        """The owner's answer. Raises TransferError and msgspec.DecodeError."""
        client, address = owner
        peer = self.engine.connect(address, timeout_s=self._limit_s(deadline_s))
        method, body = tiers.stage_method(client), protocol.encode(request)
        return tiers.decode_stage(peer.call(method, body, timeout_s=self._limit_s(deadline_s)))

    def _limit_s(self, deadline_s: float) -> float:
        return max(0.0, min(self._call_timeout_s, deadline_s - time.monotonic()))

    def region(self, descriptor: bytes, deadline_s: float) -> RemoteRegion:
        """The owner's memory, as the engine reaches it. Raises TransferError."""
        with self._lock:
            known = self._regions.get(descriptor)
        if known is None:
            known = self.engine.import_region(descriptor, timeout_s=self._limit_s(deadline_s))
            with self._lock:
                if len(self._regions) >= KNOWN_REGIONS:
                    self._regions.clear()
                self._regions[descriptor] = known
        return known


class TierReading:
    """The values of one batch that lie in tiers only.

    Attributes:
        sizes: by position in the batch.
        failed: positions of what could not be read.
    """

    def __init__(self, client: TierClient, tiered: tiers.Tiered, digests: Sequence[bytes]) -> None:
        self._client = client
        self._owners = tiered.owners
        self._digests = digests
        rows = np.frombuffer(tiered.rows, dtype="<u8").reshape(-1, 5).tolist()
        self._rows = {row[0]: row[1:] for row in rows}
        self.sizes = {position: row[3] for position, row in self._rows.items()}
        self.failed: set[int] = set()
        self._silent: set[tuple[int, str]] = set()  # owners that are not asked again

    def fetch_parts(self, memory: LocalMemory, parts: Uints, timeout_s: float) -> None:
        """Move parts: rows of position, offset inside the value, local offset, bytes.

        Each tier has a TimeBudget of ``timeout_s``, and what did not move before is left out.
        """
        wanted: dict[int, list[list[int]]] = {}
        for part in parts.tolist():
            if part[0] in self._rows and part[0] not in self.failed:
                wanted.setdefault(part[0], []).append(part)
        by_tier: dict[int, list[int]] = {}
        for position in wanted:
            by_tier.setdefault(self._rows[position][0], []).append(position)
        for tier, positions in by_tier.items():
            left, budget = positions, TimeBudget(timeout_s)
            owners = [owner for owner in self._owners[tier] if owner not in self._silent]
            owners.sort(key=lambda owner: owner[0] != self._client.client)
            for number, owner in enumerate(owners):
                nbytes = sum(part[3] for position in left for part in wanted[position])
                deadline_s = budget.begin(nbytes, len(owners) - number)
                left = self._from(owner, tier, left, wanted, memory, deadline_s)
                budget.end()
                if not left:
                    break
            self.failed.update(left)

    def _from(
        self,
        owner: tuple[int, str],
        tier: int,
        positions: list[int],
        wanted: dict[int, list[list[int]]],
        memory: LocalMemory,
        deadline_s: float,
    ) -> list[int]:
        """Read what this owner gives; what it did not."""
        left: list[int] = []
        todo = positions
        while todo:
            request = tiers.Stage(
                tier=tier,
                digests=b"".join(bytes(self._digests[position]) for position in todo),
                numbers=np.array([self._rows[position][1:] for position in todo], dtype="<u8").tobytes(),
            )
            try:
                offsets = self._once(owner, request, todo, wanted, memory, deadline_s)
            except (TransferError, TierError, msgspec.DecodeError, MemoryError) as error:
                log.warning("%d values of a tier could not be read from %s: %s", len(todo), owner[1], error)
                if isinstance(error, (TransferTimeout, CallTimeout, PeerUnreachable)):
                    self._silent.add(owner)
                return left + todo
            if not offsets:
                return left + todo
            left += [position for position, offset in zip(todo, offsets, strict=False) if offset < 0]
            todo = todo[len(offsets) :]
        return left

    def _once(
        self,
        owner: tuple[int, str],
        request: tiers.Stage,
        positions: list[int],
        wanted: dict[int, list[list[int]]],
        memory: LocalMemory,
        deadline_s: float,
    ) -> list[int]:
        """Stage, read, and let go; where each of the first ones lay, -1 for what was not read."""
        here = self._client.own if owner[0] == self._client.client else None
        if here is not None:
            lease = here.stage(request)
            blocks = _blocks(positions, lease.offsets, wanted)
            staged_bytes = np.frombuffer(lease.region.view(), dtype=np.uint8)
            array = memory.array
            for local, start, nbytes in blocks.tolist():
                array[local : local + nbytes] = staged_bytes[start : start + nbytes]
            held = here.staging.end(lease.id)
            return lease.offsets if held else [-1] * len(lease.offsets)
        staged = self._client.ask(owner, request, deadline_s)
        assert isinstance(staged, tiers.Staged)
        blocks = _blocks(positions, staged.offsets, wanted)
        if len(blocks):
            remote = self._client.region(staged.descriptor, deadline_s)
            here_too, engine = memory.region(), self._client.engine
            compare = crosses_network(engine, remote) and may_compare(here_too, remote)
            transfer = engine.read(here_too, remote, blocks, verify=compare or None)
            try:
                transfer.wait(max(0.0, deadline_s - time.monotonic()))
            except MemoryInUse:
                memory.keep()
                raise
        ended = self._client.ask(owner, tiers.Unstage(lease=staged.lease), deadline_s)
        if not (isinstance(ended, tiers.Unstaged) and ended.held):
            return [-1] * len(staged.offsets)
        if len(blocks):
            memory.arrived(blocks)
        return staged.offsets


def _blocks(positions: list[int], offsets: list[int], wanted: dict[int, list[list[int]]]) -> Uints:
    rows = [
        (local, start + inside, nbytes)
        for position, start in zip(positions, offsets, strict=False)
        if start >= 0
        for _, inside, local, nbytes in wanted[position]
        if nbytes
    ]
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)
