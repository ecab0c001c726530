"""Collectives as torch calls them, by their names of old (2.4) and new (2.13) releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mooncake_ep.pg.engine import GroupEngine
from mooncake_ep.pg.errors import CollectiveMismatch
from mooncake_ep.pg.types import Staged, flat, op_of, span, type_of
from mooncake_ep.pg.work import GroupWork, SequenceWork

__all__ = ["Collectives"]

Tensors = Sequence[torch.Tensor]


def _one(tensors: Tensors, what: str) -> torch.Tensor:
    if len(tensors) != 1:
        raise CollectiveMismatch(f"{what} takes one tensor of each rank, not {len(tensors)}")
    return tensors[0]


def _check_parts(parts: Tensors, ranks: int, each: int | None, what: str) -> None:
    """Raise CollectiveMismatch unless there is a tensor for every rank, each of as many bytes."""
    if len(parts) != ranks:
        raise CollectiveMismatch(f"{what} needs a tensor for each of {ranks} ranks, not {len(parts)}")
    for rank, part in enumerate(parts):
        nbytes = part.numel() * part.element_size()
        if each is not None and nbytes != each:
            raise CollectiveMismatch(
                f"the tensor of rank {rank} in {what} has {nbytes} bytes, that of this rank {each}"
            )


def _split(tensor: torch.Tensor, sizes: Sequence[int], ranks: int, what: str) -> list[tuple[int, int]]:
    """Return address and bytes of each rank's part along the first dimension; no sizes: equal parts."""
    rows = tensor.size(0) if tensor.dim() else 0
    if not sizes:
        if rows % ranks:
            raise CollectiveMismatch(f"{what} of {rows} rows cannot be split evenly among {ranks} ranks")
        sizes = [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise CollectiveMismatch(
            f"{what} of {rows} rows cannot be split into {list(sizes)} for {ranks} ranks"
        )
    address, nbytes = span(tensor)
    row = nbytes // rows if rows else 0
    spans = []
    for size in sizes:
        spans.append((address, size * row))
        address += size * row
    return spans


class Collectives:
    """The part of the process group that turns tensors into addresses."""

    engine: GroupEngine
    _rank: int
    _size: int
    _run: Callable[..., GroupWork]

    def allreduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Reduce over the contributors, in place."""
        tensor = _one(tensors, "all_reduce")
        op, factor = op_of(opts.reduceOp) if opts is not None else (0, 1.0)
        number, count = type_of(tensor, op)
        call = self.engine.all_reduce
        if tensor.is_cpu and tensor.is_contiguous():
            return self._run(call, (tensor.data_ptr(), count, number, op, factor), opts, tensors)
        staged = Staged()
        memory = staged.output(tensor, read=True)
        return self._run(call, (memory.data_ptr(), count, number, op, factor), opts, tensors, staged)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Reduce each tensor."""
        return SequenceWork([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Copy the root's tensor to all; RankFailed on all when the root is gone."""
        tensor = _one(tensors, "broadcast")
        root = opts.rootRank if opts is not None else 0
        staged = None
        memory = tensor
        if not flat(tensor):
            staged = Staged()
            memory = staged.output(tensor, read=True)
        return self._run(self.engine.broadcast, (root, *span(memory)), opts, tensors, staged)

    def reduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Reduce to the root, in place; other ranks' tensors stay as they are."""
        tensor = _one(tensors, "reduce")
        op, factor = op_of(opts.reduceOp)
        number, count = type_of(tensor, op)
        staged = Staged()
        memory = staged.output(tensor, read=True)
        arguments = (opts.rootRank, memory.data_ptr(), count, number, op, factor)
        return self._run(self.engine.reduce_to, arguments, opts, tensors, staged)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """Collect a tensor of every rank; zeros in place of one that did not contribute."""
        tensor, parts = _one(inputs, "all_gather"), outputs[0]
        staged = Staged()
        memory = staged.input(tensor)
        address, nbytes = span(memory)
        _check_parts(parts, self._size, nbytes, "all_gather")
        written = staged.outputs(parts)
        arguments = ([span(part) for part in written], address, nbytes)
        return self._run(self.engine.all_gather, arguments, opts, parts, staged, (memory, written))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> GroupWork:
        """Collect a tensor of every rank, one behind the other."""
        staged = Staged()
        memory, written = staged.input(tensor), staged.output(output)
        address, nbytes = span(memory)
        if span(written)[1] != nbytes * self._size:
            raise CollectiveMismatch(
                f"the output of all_gather_into_tensor has {span(written)[1]} bytes, "
                f"not {self._size} times the input's {nbytes}"
            )
        arguments = (written.data_ptr(), self._size, address, nbytes)
        return self._run(self.engine.all_gather_even, arguments, opts, [output], staged, (memory, written))

    _allgather_base = all_gather_single

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """Collect several tensors of every rank: `outputs[rank][i]`."""
        works = [
            self.allgather([[row[i] for row in outputs]], [tensor], opts) for i, tensor in enumerate(inputs)
        ]
        return SequenceWork(works, [tensor for row in outputs for tensor in row])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        """`all_gather_single` of each pair."""
        pairs = zip(outputs, inputs, strict=True)
        return SequenceWork([self.all_gather_single(out, tensor, opts) for out, tensor in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _reduce_scatter(
        self, output: torch.Tensor, spans: list[tuple[int, int]], opts: Any, staged: Staged, kept: Any
    ) -> GroupWork:
        op, factor = op_of(opts.reduceOp) if opts is not None else (0, 1.0)
        number, _ = type_of(output, op)
        written = staged.output(output)
        if spans[self._rank][1] != span(written)[1]:
            raise CollectiveMismatch(
                f"the output of reduce_scatter has {span(written)[1]} bytes, "
                f"this rank's input {spans[self._rank][1]}"
            )
        arguments = (written.data_ptr(), spans, number, op, factor)
        return self._run(self.engine.reduce_scatter, arguments, opts, [output], staged, (kept, written))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> GroupWork:
        """Reduce `inputs[0][rank]` to each rank."""
        output, parts = _one(outputs, "reduce_scatter"), inputs[0]
        _check_parts(parts, self._size, None, "reduce_scatter")
        staged = Staged()
        memory = staged.inputs(parts)
        return self._reduce_scatter(output, [span(part) for part in memory], opts, staged, memory)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> GroupWork:
        """Reduce the equal parts of a tensor, one to each rank."""
        staged = Staged()
        memory = staged.input(tensor)
        spans = _split(memory.view(-1), [], self._size, "the input of reduce_scatter_tensor")
        return self._reduce_scatter(output, spans, opts, staged, memory)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        """`reduce_scatter_single` of each pair."""
        pairs = zip(outputs, inputs, strict=True)
        return SequenceWork([self.reduce_scatter_single(out, tensor, opts) for out, tensor in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        """Give `inputs[rank]` to each rank; sizes may differ."""
        _check_parts(outputs, self._size, None, "the output of all_to_all")
        _check_parts(inputs, self._size, None, "the input of all_to_all")
        staged = Staged()
        memory, written = staged.inputs(inputs), staged.outputs(outputs)
        arguments = ([span(part) for part in written], [span(part) for part in memory])
        return self._run(self.engine.all_to_all, arguments, opts, outputs, staged, (memory, written))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> GroupWork:
        """Give rows of a tensor to each rank; the sizes count rows, none: equal parts."""
        staged = Staged()
        memory, written = staged.input(tensor), staged.output(output)
        outs = _split(written, output_sizes, self._size, "the output of all_to_all_single")
        ins = _split(memory, input_sizes, self._size, "the input of all_to_all_single")
        return self._run(self.engine.all_to_all, (outs, ins), opts, [output], staged, (memory, written))

    alltoall_base = all_to_all_single

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """Collect a tensor of every rank at the root."""
        tensor = _one(inputs, "gather")
        staged = Staged()
        memory = staged.input(tensor)
        address, nbytes = span(memory)
        parts: Tensors = outputs[0] if outputs and opts.rootRank == self._rank else []
        if opts.rootRank == self._rank:
            _check_parts(parts, self._size, nbytes, "gather")
        written = staged.outputs(parts)
        arguments = (opts.rootRank, [span(part) for part in written], address, nbytes)
        return self._run(self.engine.gather, arguments, opts, parts, staged, (memory, written))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> GroupWork:
        """Give each rank one of the root's tensors; RankFailed on all when the root is gone."""
        output = _one(outputs, "scatter")
        staged = Staged()
        written = staged.output(output)
        address, nbytes = span(written)
        parts: Tensors = inputs[0] if inputs and opts.rootRank == self._rank else []
        if opts.rootRank == self._rank:
            _check_parts(parts, self._size, nbytes, "scatter")
        memory = staged.inputs(parts)
        arguments = (opts.rootRank, address, nbytes, [span(part) for part in memory])
        return self._run(self.engine.scatter, arguments, opts, outputs, staged, (memory, written))

    def barrier(self, opts: Any = None) -> GroupWork:
        """Wait until every member is here or out of the group."""
        return self._run(self.engine.barrier, (), opts, [])
