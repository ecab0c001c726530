"""Tensors and reductions as the compiled core takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from mooncake_ep.pg.errors import CollectiveMismatch, GroupUnavailable

__all__ = ["REAL_OF", "TYPES", "Staged", "flat", "op_of", "span", "type_of"]

TYPES: dict[torch.dtype, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.bfloat16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bool: 9,
}
REAL_OF: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_ReduceOp: Any = ReduceOp  # its constants are integers too, which torch's types do not say
# By what torch's enumeration says as an integer: comparing its values takes a microsecond.
_OPS = {
    int(_ReduceOp.SUM): 0,
    int(_ReduceOp.PRODUCT): 1,
    int(_ReduceOp.MIN): 2,
    int(_ReduceOp.MAX): 3,
    int(_ReduceOp.AVG): 4,
    int(_ReduceOp.BAND): 5,
    int(_ReduceOp.BOR): 6,
    int(_ReduceOp.BXOR): 7,
}
_SUM, _AVG, _PREMUL_SUM = 0, 4, 8


def op_of(op: Any) -> tuple[int, float]:
    """Return the core's number of a reduction, and its factor: 1 unless it is PREMUL_SUM."""
    # Of the `ReduceOp` in torch's options, or one of its constants, which are the kinds themselves.
    kind = getattr(op, "op", op)
    number = _OPS.get(int(kind))
    if number is not None:
        return number, 1.0
    factor = op.__getstate__()[1] if hasattr(op, "__getstate__") else None
    if isinstance(factor, torch.Tensor):
        factor = factor.item()
    if not isinstance(factor, (int, float)):
        raise GroupUnavailable(f"{op} is no reduction of a process group")
    return _PREMUL_SUM, float(factor)


def type_of(tensor: torch.Tensor, op: int) -> tuple[int, int]:
    """Return the core's number of the element type, and the count of elements; complex ones as their reals.

    Raises GroupUnavailable for a type, or a type with an operation, that has no meaning here.
    """
    dtype, count = tensor.dtype, tensor.numel()
    number = TYPES.get(dtype)
    if number is None:
        real = REAL_OF.get(dtype)
        if real is None or op not in (_SUM, _AVG, _PREMUL_SUM):
            raise GroupUnavailable(f"this reduction of {dtype} is not there; complex numbers have sums only")
        return TYPES[real], 2 * count
    if 5 <= op <= 7 and dtype.is_floating_point:
        raise GroupUnavailable(f"a bitwise reduction of {dtype} has no meaning; use an integer type or bool")
    return number, count


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and bytes of a contiguous CPU tensor."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def flat(tensor: torch.Tensor) -> bool:
    """Whether the core can take the tensor as it is: in memory of the CPU, without gaps."""
    return tensor.is_cpu and tensor.is_contiguous()


class Staged:
    """Copies of tensors that the core cannot take as they are: of a device, or with gaps.

    `inputs` are copied at once, `outputs` back by `finish()`. What needs no copy is used itself.
    """

    __slots__ = ("_back",)

    def __init__(self) -> None:
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []

    def input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the core reads in place of the tensor."""
        return tensor if flat(tensor) else _plain(tensor)

    def output(self, tensor: torch.Tensor, *, read: bool = False) -> torch.Tensor:
        """Return what the core writes in place of the tensor; `read`: it reads it first."""
        if flat(tensor):
            return tensor
        memory = _plain(tensor) if read else torch.empty(tensor.shape, dtype=tensor.dtype)
        self._back.append((tensor, memory))
        return memory

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`input` of each."""
        return [self.input(tensor) for tensor in tensors]

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`output` of each."""
        return [self.output(tensor) for tensor in tensors]

    @property
    def pending(self) -> bool:
        """Whether `finish` has anything to copy."""
        return bool(self._back)

    def finish(self) -> None:
        """Copy the outputs to where they belong."""
        for tensor, memory in self._back:
            tensor.copy_(memory)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise CollectiveMismatch(f"a {tensor.layout} tensor cannot be sent; make it dense first")
    return tensor.detach().contiguous().cpu()
