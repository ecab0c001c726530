"""The low-latency mode: a row for every chosen expert, packed by expert; weights are applied on return.

Rows are read where their rank wrote them: a dispatch writes each token once whatever the number of ranks, a
combine reads each expert's result once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mooncake_ep import _core
from mooncake_ep._errors import ShapeError
from mooncake_ep.exchange.channel import Channel
from mooncake_ep.exchange.dispatching import post_rows, sources_of
from mooncake_ep.exchange.handle import Handle, Shape
from mooncake_ep.exchange.ownership import experts_as_tensor, local_ids
from mooncake_ep.exchange.peers import Peers
from mooncake_ep.exchange.rows import Payload, Source, check_room, sum_rows, write
from mooncake_ep.layout import ExpertOwners
from mooncake_ep.reference_fp8 import pack_ue8m0

__all__ = ["LowLatency"]

ROUND, CAPACITY, ROW_BYTES, EXPERTS = range(4)


@dataclass(frozen=True, eq=False)
class Result:
    """Where a dispatch's rows go: `x` [local experts, capacity, hidden], `scales` [local experts, groups,
    capacity], `counts` int32 [local experts]; `local_of` int32 [experts].
    """

    x: torch.Tensor
    scales: torch.Tensor
    counts: torch.Tensor
    handle: Handle
    local_of: torch.Tensor


class LowLatency:
    """Both halves of a rank's dispatches and combines. Results are good for two calls."""

    def __init__(self, peers: Peers, dispatches: Channel, combines: Channel) -> None:
        self.peers, self.dispatches, self.combines = peers, dispatches, combines
        self._received: dict[object, torch.Tensor] = {}

    def capacity(self, shape: Shape) -> int:
        """Rows that an expert may get."""
        return self.peers.size * shape.max_tokens

    def send(
        self,
        payload: Payload,
        topk_idx: torch.Tensor,
        shape: Shape,
        deadline_ns: int,
        fp8: bool,
        round_scale: bool,
    ) -> int:
        """Show our tokens to all ranks; returns the round."""
        if len(payload.x) > shape.max_tokens or payload.x.shape[1] != shape.hidden:
            raise ShapeError(
                f"x {tuple(payload.x.shape)} is more than {shape.max_tokens} tokens, all that a rank may send"
            )
        quantize = fp8 and payload.scales is None
        return post_rows(
            self.dispatches, payload, topk_idx, None, deadline_ns, quantize=quantize, round_scale=round_scale
        )

    def prepare(
        self,
        number: int,
        topk_idx: torch.Tensor,
        shape: Shape,
        owners: ExpertOwners,
        fp8: bool,
        device: torch.device,
    ) -> Result:
        """Make room for what a round brings."""
        local, capacity = len(owners.experts_of(self.peers.rank)), self.capacity(shape)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        groups = shape.hidden // 128 if fp8 else 0
        src_info = torch.full((local, capacity), -1, dtype=torch.int32)
        layout = torch.zeros(local, self.peers.size, dtype=torch.int64)
        return Result(
            x=self._buffer(number, (local, capacity, shape.hidden), dtype),
            scales=self._buffer(number, (local, groups, capacity), torch.float32),
            counts=torch.zeros(local, dtype=torch.int32),
            handle=Handle.of(src_info, layout, shape, number, topk_idx, device),
            local_of=local_ids(owners, self.peers.rank),
        )

    def receive(self, result: Result, deadline_ns: int, waits_us: list[int]) -> None:
        """Take what all ranks sent to our experts, in order of rank."""
        handle, x = result.handle, result.x
        capacity = x.shape[1]
        ends = torch.zeros(len(x), dtype=torch.int64)
        for source in sources_of(self.dispatches, handle.round, deadline_ns, waits_us):
            before = ends.clone()
            if _fits(source, handle.shape, x.dtype):
                rows = (source.rows_at, source.scales_at, source.row_bytes, source.groups)
                to = (x.data_ptr(), result.scales.data_ptr())
                taken = handle.src_info.data_ptr()
                _core.take_choices(
                    source.routing(result.local_of), (*rows, *to), capacity, ends.data_ptr(), taken
                )
            if self.dispatches.is_intact(source.rank, handle.round):
                handle.layout_range[:, source.rank] = before << 32 | (ends - before)
            else:
                ends = before  # what was read is of no round; the next source's rows take the place
        self.dispatches.finish_all(handle.round)
        result.counts.copy_(ends)

    def combine_buffer(self, handle: Handle, deadline_ns: int) -> torch.Tensor:
        """The memory that the next combine is read from: bf16 [local experts, ranks * max tokens, hidden]."""
        extents = (len(handle.layout_range), self.capacity(handle.shape), handle.shape.hidden)
        check_room(0, extents[0] * extents[1] * extents[2] * 2)
        number = self.combines.claim(deadline_ns)
        return self.peers.view(self.peers.rank, self.combines.rows(number), extents, torch.bfloat16)

    def send_results(
        self, x: torch.Tensor, handle: Handle, zero_copy: bool, logfmt: bool, deadline_ns: int
    ) -> int:
        """Show what our experts made of their rows; returns the round."""
        target = self.combine_buffer(handle, deadline_ns)
        number = self.combines.claim(deadline_ns)
        if zero_copy:
            if logfmt or x.data_ptr() != target.data_ptr():
                raise ShapeError(
                    "zero_copy: x must be what get_next_low_latency_combine_buffer returned last, "
                    "and is read as it is: use_logfmt, which encodes it, goes without"
                )
        else:
            self._write_used(number, x, handle, logfmt)
        row_bytes = _row_bytes(handle.shape, logfmt)
        header = self.combines.header(self.peers.rank, number)
        header[: EXPERTS + 1] = [handle.round, self.capacity(handle.shape), row_bytes, len(x)]
        write(self.peers, self.combines.tables(number), handle.layout_range)
        return self.combines.post()

    def _write_used(self, number: int, x: torch.Tensor, handle: Handle, logfmt: bool) -> None:
        """Write the rows that tokens came for, as they are or encoded."""
        extents = (len(handle.layout_range), self.capacity(handle.shape), handle.shape.hidden)
        if tuple(x.shape) != extents or x.dtype != torch.bfloat16:
            raise ShapeError(f"x must be bfloat16 {extents}, not {x.dtype} {tuple(x.shape)}")
        counts = (handle.layout_range & 0xFFFFFFFF).sum(1)
        values, row_bytes = x.contiguous(), _row_bytes(handle.shape, logfmt)
        blocks, rows, hidden = extents
        check_room(0, blocks * rows * row_bytes)
        to = self.peers.address(self.peers.rank, self.combines.rows(number))
        if logfmt:
            _core.encode_logfmt(values.data_ptr(), to, blocks, rows, counts.data_ptr(), hidden)
        else:
            _core.copy_blocks(values.data_ptr(), to, blocks, rows * row_bytes, counts.data_ptr(), row_bytes)

    def receive_results(
        self,
        number: int,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Handle,
        owners: ExpertOwners,
        out: torch.Tensor,
        logfmt: bool,
        deadline_ns: int,
        waits_us: list[int],
    ) -> None:
        """Add what came of our tokens into `out` [tokens, hidden], in top-k order; who is gone adds nothing.

        A choice that is -1 in `topk_idx`, though it was dispatched, adds nothing either.
        """
        sent = torch.bincount(handle.topk_idx[handle.topk_idx >= 0], minlength=owners.num_experts)
        read = []
        bases = torch.zeros(owners.num_experts, dtype=torch.int64)
        for rank in range(self.peers.size):
            if self.combines.wait(rank, number, deadline_ns, waits_us):
                bases += self._bases(rank, number, handle, owners, sent, logfmt)
                read.append(rank)
        for _ in range(self.peers.size):
            self._add(topk_idx, topk_weights, bases, handle, out, logfmt)
            torn = [rank for rank in read if not self.combines.is_intact(rank, number)]
            if not torn:
                break
            gone = torch.tensor([owner in torn for owner in owners.owner_of])
            bases, read = bases.masked_fill(gone, 0), [rank for rank in read if rank not in torn]
        self.combines.finish_all(number)

    def _bases(
        self,
        rank: int,
        number: int,
        handle: Handle,
        owners: ExpertOwners,
        sent: torch.Tensor,
        logfmt: bool,
    ) -> torch.Tensor:
        """Where results for us begin, int64 [experts]; 0 for experts of other ranks and without results."""
        bases = torch.zeros(owners.num_experts, dtype=torch.int64)
        header = self.combines.header(rank, number)
        experts = owners.experts_of(rank)
        if header[ROUND] != handle.round or header[EXPERTS] != len(experts):
            self.peers.alive[rank] = False
            return bases
        row_bytes = _row_bytes(handle.shape, logfmt)
        if header[ROW_BYTES] != row_bytes:
            raise ShapeError(
                f"rank {rank} returns rows of {header[ROW_BYTES]} bytes, this rank expects {row_bytes}; "
                "hidden and use_logfmt must be the same on all ranks"
            )
        if not experts:
            return bases
        tables = self.combines.tables(number)
        mine = self.peers.view(rank, tables, (len(experts), self.peers.size), torch.int64)[:, self.peers.rank]
        theirs = experts_as_tensor(owners, rank)
        if not torch.equal(mine & 0xFFFFFFFF, sent[theirs]):
            self.peers.alive[rank] = False  # it gave us up before it had our tokens
            return bases
        first = torch.arange(len(experts)) * header[CAPACITY] + (mine >> 32)
        bases[theirs] = self.peers.address(rank, self.combines.rows(number)) + first * row_bytes
        return bases

    def _add(
        self,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        bases: torch.Tensor,
        handle: Handle,
        out: torch.Tensor,
        logfmt: bool,
    ) -> None:
        sent = handle.topk_idx
        addends = torch.empty_like(sent)
        row_bytes = _row_bytes(handle.shape, logfmt)
        _core.find_choices(
            sent.data_ptr(),
            len(sent),
            sent.shape[1],
            bases.data_ptr(),
            len(bases),
            row_bytes,
            addends.data_ptr(),
        )
        addends.masked_fill_(topk_idx < 0, 0)
        if not logfmt:
            return sum_rows(addends, weights, out)
        at = (addends.data_ptr(), weights.data_ptr(), out.data_ptr())
        return _core.sum_logfmt(len(out), addends.shape[1], out.shape[1], *at)

    def _buffer(self, number: int, extents: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for results, used again after two rounds: its pages are there already."""
        key = (number % 2, extents, dtype)
        if key not in self._received:
            self._received[key] = torch.empty(extents, dtype=dtype)
        return self._received[key]


def shown_scales(scales: torch.Tensor, use_ue8m0: bool) -> torch.Tensor:
    """Scales as DeepEP shows them: [experts, rows, groups] in columns, or four exponents in an int32."""
    shown = scales.transpose(1, 2)
    return pack_ue8m0(shown) if use_ue8m0 else shown


def _fits(source: Source, shape: Shape, dtype: torch.dtype) -> bool:
    if source.tokens == 0:
        return False
    if (source.hidden, source.dtype) != (shape.hidden, dtype) or source.tokens > shape.max_tokens:
        raise ShapeError(
            f"rank {source.rank} dispatched {source.tokens} tokens of {source.hidden} {source.dtype}, "
            f"this rank expects {shape.hidden} {dtype} and up to {shape.max_tokens} tokens"
        )
    return True


def _row_bytes(shape: Shape, logfmt: bool) -> int:
    """Bytes from one row of results to the next."""
    return _core.logfmt_bytes(shape.hidden) if logfmt else shape.hidden * 2
