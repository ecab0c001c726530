"""Tensors of GPUs, brought to the CPU's memory and back: between ranks, bytes go through memory of the CPU.

What lies there already is used as it is. Copies are torch's own, on the current stream of the device; each
waits for what was queued before and is over when it returns.
"""

from __future__ import annotations

import torch

__all__ = ["Staging"]


class Staging:
    """The copies of one call whose tensors are on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._due: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    @property
    def copies(self) -> bool:
        """Whether there is anything to copy."""
        return self.device.type != "cpu"

    @staticmethod
    def inward(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory of the CPU, without gaps."""
        return tensor.detach().cpu().contiguous()

    def outward(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU as one of the device."""
        return tensor.to(self.device) if self.copies else tensor

    def mirror(self, tensor: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        """What the caller gets for a tensor that is not filled yet; `finish` copies it over.

        `counts` [blocks]: of each block, only so many rows, as they are by then.
        """
        if not self.copies:
            return tensor
        target = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        self.into(target, tensor, counts)
        return target

    def into(self, target: torch.Tensor, tensor: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Have `finish` copy a tensor of the CPU to where the caller wants it."""
        if target is not tensor:
            self._due.append((target, tensor, counts))

    def finish(self) -> None:
        """Copy what is due."""
        for target, tensor, counts in self._due:
            if counts is None:
                target.copy_(tensor)
                continue
            for block, count in enumerate(counts.tolist()):
                target[block, :count].copy_(tensor[block, :count])
