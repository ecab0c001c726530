"""Copies of experts in host memory, for when the only rank that serves them dies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mooncake_ep.repair.copying import Copy, CopyJob
from mooncake_ep.repair.sources import sources_of
from mooncake_ep.repair.weights import Offer
from mooncake_transfer import Region, TransferEngine

__all__ = ["HostBackup"]

Key = tuple[int, int]  # layer, expert


class HostBackup:
    """What one rank keeps of other ranks' experts. One thread uses it.

    Weights of an expert do not change while they are kept: this is for serving, not for training.
    """

    def __init__(self, engine: TransferEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self._kept: dict[Key, Region] = {}
        self._coming: dict[Key, Region] = {}
        self._job: CopyJob | None = None

    @property
    def kept(self) -> dict[Key, tuple[bytes, int]]:
        """What is here, for `SlotWeights.offer`: by (layer, expert), where it can be read."""
        self._take_what_came()
        return {key: (region.descriptor("r"), 0) for key, region in self._kept.items()}

    def keep(
        self,
        wanted: Sequence[tuple[int, int, int]],
        placement: torch.Tensor,
        slots_of_rank: Sequence[int],
        offers: Mapping[int, Offer],
        *,
        bytes_per_s: float | None = None,
        deadline_s: float = 60.0,
    ) -> CopyJob:
        """Keep what `wanted` (all of `last_copies`) gives to this rank, and nothing else.

        Reads what is not here yet in the background, as `start_repair` does; `kept` shows it once that is
        done, so make a new offer then. What is kept and not wanted any more is given back at once. Raises
        MemoryUnavailable.
        """
        if self._job is not None:
            self._job.cancel()
        self._take_what_came()
        mine = {(layer, expert) for layer, expert, rank in wanted if rank == self._rank}
        for key in self._kept.keys() - mine:
            self._kept.pop(key).close()
        copies = []
        for layer, expert in sorted(mine - self._kept.keys()):
            nbytes = next(iter(offers.values())).slot_bytes[layer]
            region = self._engine.allocate(nbytes, name=f"copy of expert {expert}, layer {layer}")
            self._coming[layer, expert] = region
            found = tuple(sources_of(layer, expert, -1, placement, slots_of_rank, offers))
            copies.append(Copy(layer, expert, -1, nbytes, region, 0, found))
        self._job = CopyJob(self._engine, self._rank, copies, bytes_per_s=bytes_per_s, deadline_s=deadline_s)
        return self._job

    def _take_what_came(self) -> None:
        """Show copies once all of them are whole; drop them when they failed."""
        if self._job is None or not self._job.done():
            return
        if self._job.complete:
            self._kept |= self._coming
        else:
            for region in self._coming.values():
                region.close()
        self._coming, self._job = {}, None

    def close(self) -> None:
        """Give all memory back."""
        if self._job is not None:
            self._job.cancel()
        for region in (*self._kept.values(), *self._coming.values()):
            region.close()
        self._kept, self._coming, self._job = {}, {}, None
