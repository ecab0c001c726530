"""The memory of a rank's slots, and what its peers need to know to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mooncake_ep._errors import PlacementError, ShapeError
from mooncake_transfer import Region, TransferEngine

__all__ = ["Offer", "SlotWeights"]


@dataclass(frozen=True)
class Offer:
    """What a rank lets others read: its slots and its host copies. Plain values; give it to every rank.

    `slots` [layers]: descriptors of the regions of slots, `slot_bytes` [layers]: how long a slot is.
    `kept`: (layer, expert) to the descriptor and the offset of a host copy. Descriptors hold access keys, for
    reading: whoever has an offer can read the weights.
    """

    rank: int
    slots: tuple[bytes, ...]
    slot_bytes: tuple[int, ...]
    kept: Mapping[tuple[int, int], tuple[bytes, int]] = field(default_factory=dict)


class SlotWeights:
    """Weights of the experts in one rank's slots, registered with its transfer engine.

    `layers[i]` is a contiguous tensor [slots, ...] of any type and device that the engine takes; all layers
    have as many slots. The tensors are the model's own: they are read by peers in place, and written by
    repairs. Raises ShapeError for tensors that are no such thing, and what `TransferEngine.register` raises.
    """

    def __init__(self, engine: TransferEngine, rank: int, layers: Sequence[torch.Tensor]) -> None:
        if not layers or any(
            one.dim() < 2 or len(one) != len(layers[0]) or not one.is_contiguous() for one in layers
        ):
            raise ShapeError(
                "weights must be one contiguous tensor [slots, ...] for each layer, of as many slots each, "
                f"not {[tuple(one.shape) for one in layers]}"
            )
        self.engine, self.rank = engine, rank
        self.layers = tuple(layers)
        self.slots = len(layers[0])
        self._bytes = [one.view(torch.uint8).view(len(one), -1) for one in layers]
        self.regions: list[Region] = engine.register_many(
            self._bytes, names=[f"experts of layer {number}" for number in range(len(layers))]
        )

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of a slot of each layer."""
        return tuple(one.shape[1] for one in self._bytes)

    def offer(self, kept: Mapping[tuple[int, int], tuple[bytes, int]] | None = None) -> Offer:
        """What peers need to read from us; `kept`: `HostBackup.kept`."""
        descriptors = tuple(region.descriptor("r") for region in self.regions)
        return Offer(self.rank, descriptors, self.slot_bytes, dict(kept or {}))

    def slot(self, layer: int, slot: int) -> torch.Tensor:
        """The bytes of one of our slots, which counts from 0 on this rank."""
        if not (0 <= layer < len(self._bytes) and 0 <= slot < self.slots):
            raise PlacementError(
                f"layer {layer}, slot {slot} of a rank with {len(self._bytes)} layers of {self.slots} slots"
            )
        return self._bytes[layer][slot]

    def close(self) -> None:
        """Let nobody read any more; waits for who still does."""
        for region in self.regions:
            region.close()
