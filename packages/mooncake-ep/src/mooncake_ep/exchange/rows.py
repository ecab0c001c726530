"""Rows of activations on their way: what may be sent, how it is written, and the calls into the core."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from mooncake_ep import _core
from mooncake_ep._errors import RoutingError, ShapeError
from mooncake_ep.exchange.peers import META_BYTES, REGION_BYTES, Peers

__all__ = ["Payload", "Source", "check_topk", "payload_of", "sum_rows", "write"]

GROUP = 128
COUNT = 0xFFFFFFFF  # of a place: where rows begin << 32 | how many they are
FLOATS = (torch.bfloat16, torch.float32)
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class Payload:
    """Rows to be sent: contiguous `x` [tokens, hidden], and float32 scales [tokens, hidden / 128] or None."""

    x: torch.Tensor
    scales: torch.Tensor | None


def payload_of(x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Payload:
    """Check activations: bf16 or float32 [tokens, hidden], or a pair of e4m3 and its scales."""
    values, scales = x if isinstance(x, tuple) else (x, None)
    wanted = (torch.float8_e4m3fn,) if scales is not None else FLOATS
    if values.dim() != 2 or values.dtype not in wanted or values.device.type != "cpu":
        names = " or ".join(str(one) for one in wanted)
        raise ShapeError(
            f"x must be {names} [tokens, hidden] in CPU memory, not {values.dtype} {tuple(values.shape)} on "
            f"{values.device}"
        )
    if scales is None:
        return Payload(values.contiguous(), None)
    expected = (values.shape[0], values.shape[1] // GROUP)
    if tuple(scales.shape) != expected or scales.dtype != torch.float32 or values.shape[1] % GROUP:
        raise ShapeError(
            f"scales must be float32 {expected}, one for {GROUP} channels, not {tuple(scales.shape)}"
        )
    return Payload(values.contiguous(), scales.contiguous())


def check_topk(topk_idx: torch.Tensor, tokens: int, num_experts: int) -> torch.Tensor:
    """Return contiguous int64 [tokens, topk] of experts or -1; raise RoutingError for anything else."""
    if topk_idx.dim() != 2 or topk_idx.dtype != torch.int64 or len(topk_idx) != tokens:
        raise RoutingError(
            f"topk_idx must be int64 [{tokens}, topk], not {topk_idx.dtype} {tuple(topk_idx.shape)}"
        )
    if topk_idx.numel():
        low, high = (int(one) for one in topk_idx.aminmax())
        if low < -1 or high >= num_experts:
            raise RoutingError(
                f"topk_idx names expert {low if low < -1 else high}; experts go from 0 to {num_experts - 1}, "
                "and -1 drops a choice"
            )
    return topk_idx.contiguous()


def write(peers: Peers, offset: int, tensor: torch.Tensor) -> int:
    """Write a tensor into our window; returns the offset behind it."""
    size = tensor.numel() * tensor.element_size()
    if size:
        ctypes.memmove(peers.address(peers.rank, offset), tensor.data_ptr(), size)
    return offset + size


def check_room(table_bytes: int, row_bytes: int) -> None:
    """Raise ShapeError for what no region can hold."""
    if table_bytes > META_BYTES or row_bytes > REGION_BYTES - META_BYTES:
        raise ShapeError(
            f"{table_bytes} bytes of routing and {row_bytes} of rows: one call carries up to "
            f"{META_BYTES} and {REGION_BYTES - META_BYTES}; send fewer tokens at once"
        )


@dataclass(frozen=True)
class Source:
    """What one rank posted in a dispatch, by its addresses in this process."""

    rank: int
    tokens: int
    topk: int
    hidden: int
    dtype: torch.dtype
    groups: int
    topk_at: int
    weights_at: int  # 0: none
    rows_at: int
    scales_at: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, without its scales."""
        return self.hidden * self.dtype.itemsize

    def routing(self, local_of: torch.Tensor) -> tuple[int, int, int, int]:
        """As the core takes it; local_of: int32 [experts]."""
        return self.topk_at, self.tokens, self.topk, local_of.data_ptr()

    def rows(self, to: torch.Tensor, first_row: int, scales_to: torch.Tensor | None) -> tuple[int, ...]:
        """As the core takes it, from row `first_row` of a result on."""
        scales_at = 0 if scales_to is None else scales_to.data_ptr() + first_row * self.groups * 4
        groups = self.groups if scales_to is not None else 0
        source = self.scales_at if scales_to is not None else 0
        return (
            self.rows_at,
            source,
            self.row_bytes,
            groups,
            to.data_ptr() + first_row * self.row_bytes,
            scales_at,
        )


def sum_rows(
    addends: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    first: tuple[torch.Tensor, ...] = (),
) -> None:
    """Add rows at addresses int64 [count, most] into `out` [count, width], in order, in float32."""
    at = [one.data_ptr() for one in first] + [0, 0]
    _core.sum_rows(
        out.dtype == torch.bfloat16,
        len(out),
        addends.shape[1],
        out.shape[1],
        addends.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        at[0],
        at[1],
        out.data_ptr(),
    )
