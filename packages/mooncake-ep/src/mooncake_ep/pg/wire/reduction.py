"""Reductions by torch, equal to the compiled ones to the bit: in order, 16-bit floats summed in 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mooncake_ep.pg.types import TYPES

__all__ = ["DTYPES", "Reduction", "reduce_into"]

DTYPES = {number: dtype for dtype, number in TYPES.items()}
_SUM, _PRODUCT, _MIN, _MAX, _AVG, _BAND, _BOR, _BXOR, _PREMUL_SUM = range(9)
_HALVES = (torch.float16, torch.bfloat16)

Combine = Callable[..., torch.Tensor]
_COMBINE: dict[int, Combine] = {
    _SUM: torch.add,
    _PRODUCT: torch.mul,
    _MIN: torch.minimum,
    _MAX: torch.maximum,
    _AVG: torch.add,
    _BAND: torch.bitwise_and,
    _BOR: torch.bitwise_or,
    _BXOR: torch.bitwise_xor,
    _PREMUL_SUM: torch.add,
}
# true + true is true, as torch has it.
_COMBINE_BOOL: dict[int, Combine] = {
    **dict.fromkeys((_SUM, _AVG, _MAX, _BOR, _PREMUL_SUM), torch.logical_or),
    **dict.fromkeys((_PRODUCT, _MIN, _BAND), torch.logical_and),
    _BXOR: torch.logical_xor,
}


class Reduction:
    """A kind of reduction of one element type, by the numbers that the engine's interface has for both."""

    def __init__(self, kind: int, op: int, factor: float) -> None:
        self.dtype = DTYPES[kind]
        self.op = op
        self.factor = factor
        self.number = (kind * 64 + op) * 2048
        self.wide = torch.float32 if self.dtype in _HALVES else self.dtype

    def within(self) -> Reduction:
        """Return the reduction of a part of the sources: of an average, the sum."""
        return self if self.op != _AVG else Reduction(TYPES[self.dtype], _SUM, 1.0)

    def across(self) -> Reduction:
        """Return the reduction of what came of several parts."""
        return self if self.op not in (_AVG, _PREMUL_SUM) else Reduction(TYPES[self.dtype], _SUM, 1.0)

    def finish(self, total: torch.Tensor, sources: int) -> None:
        """Make the result of what `across` brought."""
        if self.op == _AVG and self.dtype is not torch.bool:
            total.div_(sources, rounding_mode=None if self.dtype.is_floating_point else "trunc")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


def reduce_into(reduction: Reduction, out: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
    """Write the reduction of `sources`, at least one, each [n]; `out` may be one of them."""
    op, dtype = reduction.op, reduction.dtype
    if len(sources) == 1 and op != _PREMUL_SUM:
        if out.data_ptr() != sources[0].data_ptr():
            out.copy_(sources[0])
        return
    combine = (_COMBINE_BOOL if dtype is torch.bool else _COMBINE)[op]
    first, *rest = (_loaded(reduction, source) for source in sources)
    direct = reduction.wide is dtype and all(out.data_ptr() != source.data_ptr() for source in sources[2:])
    total = out if direct else torch.empty(out.shape, dtype=reduction.wide)
    if rest:
        combine(first, rest[0], out=total)
    else:
        total.copy_(first)
    for source in rest[1:]:
        combine(total, source, out=total)
    reduction.finish(total, len(sources))
    if total is not out:
        out.copy_(total)


def _loaded(reduction: Reduction, source: torch.Tensor) -> torch.Tensor:
    if reduction.op == _PREMUL_SUM and reduction.dtype is not torch.bool:
        if reduction.dtype.is_floating_point:
            return source.to(reduction.wide) * reduction.factor
        return (source.double() * reduction.factor).to(reduction.dtype)
    return source if reduction.wide is reduction.dtype else source.to(reduction.wide)
