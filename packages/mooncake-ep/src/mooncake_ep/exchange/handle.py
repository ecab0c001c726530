"""What the low-latency mode's combine needs to know of its dispatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Handle", "Shape"]


@dataclass(frozen=True)
class Shape:
    """Of one model: tokens that a rank may dispatch at once, channels, experts of all ranks."""

    max_tokens: int
    hidden: int
    num_experts: int


class Handle(tuple[object, ...]):
    """What a combine needs to know of its dispatch; as a tuple, what DeepEP's handle is.

    `src_info` int32 [local experts, ranks * max tokens]: the source token of each row. `layout_range` int64
    [local experts, ranks]: where the rows of each source begin << 32 | how many. Then the three numbers of
    `shape`. Beyond the tuple: `round`, the dispatch, `topk_idx`, what was dispatched, and `device`, whose
    tensors they were; the handle's own are in memory of the CPU.
    """

    src_info: torch.Tensor
    layout_range: torch.Tensor
    shape: Shape
    round: int
    topk_idx: torch.Tensor
    device: torch.device

    @classmethod
    def of(
        cls,
        src_info: torch.Tensor,
        layout_range: torch.Tensor,
        shape: Shape,
        number: int,
        topk_idx: torch.Tensor,
        device: torch.device,
    ) -> Handle:
        """Make a handle of its parts."""
        made = cls((src_info, layout_range, shape.max_tokens, shape.hidden, shape.num_experts))
        made.src_info, made.layout_range, made.shape = src_info, layout_range, shape
        made.round, made.topk_idx, made.device = number, topk_idx, device
        return made
