"""Tensors of another device go through memory of the CPU. There is no such device here: this one is a wrapper
whose memory nothing but torch's own copies can reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mooncake_ep import Buffer, ElasticBuffer, ExpertOwners, reference_low_latency
from mooncake_ep.reference import Tokens, combine, dispatch

FAR = torch.device("meta")  # the only one besides the CPU that every build of torch knows
HIDDEN, MOST = 128, 8


class FarTensor(torch.Tensor):
    """A tensor that says it is on another device. Its address is 0: whoever reads there ends the process."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> FarTensor:
        made: FarTensor = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), dtype=near.dtype, device=FAR
        )
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return far_call(func, args, kwargs or {})


def far_call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on what is behind; the result is far unless it was asked to come near."""
    kwargs = dict(kwargs)
    was_far = any(isinstance(one, FarTensor) for one in args)
    device = kwargs.get("device")
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    far = FAR.type == torch.device(device).type if device is not None else was_far

    def behind(one: Any) -> Any:
        return one.near if isinstance(one, FarTensor) else one

    found = func(*tree_map(behind, args), **tree_map(behind, kwargs))
    if func._schema.name.endswith("_") or func is torch.ops.aten._local_scalar_dense.default:
        return args[0] if was_far and isinstance(found, torch.Tensor) else found
    return tree_map(lambda one: FarTensor(one) if far and isinstance(one, torch.Tensor) else one, found)


class FarDevice(TorchDispatchMode):
    """Makes tensors that are asked for on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == FAR.type:
            return far_call(func, args, kwargs)
        return func(*args, **kwargs)


def far(tensor: torch.Tensor) -> torch.Tensor:
    return FarTensor(tensor.clone())


def near(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, FarTensor), "it is on the caller's device"
    return tensor.near


def inputs_of(owners: ExpertOwners) -> list[Tokens]:
    found = []
    for rank in range(owners.num_ranks):
        generator = torch.Generator().manual_seed(rank)
        topk_idx = torch.rand(MOST - rank, owners.num_experts, generator=generator).argsort(1)[:, :2]
        x = torch.randn(MOST - rank, HIDDEN, generator=generator).bfloat16()
        found.append(Tokens(x, topk_idx.contiguous(), torch.rand(MOST - rank, 2, generator=generator)))
    return found


OWNERS = ExpertOwners((0, 0, 1, 1, 1), 2)


@pytest.fixture
def inputs() -> list[Tokens]:
    return inputs_of(OWNERS)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_the_low_latency_mode_takes_and_gives_tensors_of_the_device(
    ranks: Any, inputs: list[Tokens], zero_copy: bool
) -> None:
    expected = reference_low_latency.dispatch(inputs, OWNERS, MOST)
    sums = reference_low_latency.combine([one.x for one in expected], expected, inputs, OWNERS)
    eights = reference_low_latency.dispatch(inputs, OWNERS, MOST, use_fp8=True)

    def work(rank: int, group: dist.ProcessGroup) -> bool:
        buffer, mine, wanted = Buffer(group, owners=OWNERS), inputs[rank], expected[rank]
        x, topk_idx, weights = far(mine.x), far(mine.topk_idx), far(mine.topk_weights)
        active = far(torch.ones(2, dtype=torch.int32))
        stats = far(torch.zeros(len(wanted.counts), dtype=torch.int32))
        with FarDevice():
            received, counts, handle, _, hook = buffer.low_latency_dispatch(
                x, topk_idx, MOST, 5, stats, use_fp8=False, return_recv_hook=True, active_ranks=active
            )
            hook()
            there = torch.arange(wanted.x.shape[1]) < wanted.counts[:, None]
            assert torch.equal(near(received)[there], wanted.x[there])
            assert torch.equal(near(counts), wanted.counts)
            assert torch.equal(near(stats), wanted.counts)
            results = received
            if zero_copy:
                results = buffer.get_next_low_latency_combine_buffer(handle)
                near(results).copy_(near(received))
            out = far(torch.zeros(len(mine.x), HIDDEN, dtype=torch.bfloat16))
            combined, _, _ = buffer.low_latency_combine(
                results, topk_idx, weights, handle, zero_copy=zero_copy, out=out, active_ranks=active
            )
            assert combined is out
            assert torch.equal(near(combined), sums[rank])
            (values, scales), _, _, _, _ = buffer.low_latency_dispatch(x, topk_idx, MOST, 5)
            assert torch.equal(near(values)[there].view(torch.uint8), eights[rank].x[there].view(torch.uint8))
            shown = eights[rank].scales
            assert shown is not None
            assert torch.equal(near(scales)[there], shown[there])
        dist.barrier(group)
        return True

    assert ranks(2, work) == [True, True]


def test_the_other_modes_take_and_give_tensors_of_the_device(ranks: Any, inputs: list[Tokens]) -> None:
    expected = dispatch(inputs, OWNERS)
    sums = combine([one.x for one in expected], expected, [len(one.x) for one in inputs])

    def work(rank: int, group: dist.ProcessGroup) -> bool:
        normal, elastic = Buffer(group, owners=OWNERS), ElasticBuffer(group, owners=OWNERS)
        mine, wanted = inputs[rank], expected[rank]
        x, topk_idx, weights = far(mine.x), far(mine.topk_idx), far(mine.topk_weights)
        with FarDevice():
            rows, chosen, kept, _, handle, _ = normal.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_tokens_per_expert=torch.zeros(5)
            )
            assert torch.equal(near(rows), wanted.x)
            assert torch.equal(near(chosen), wanted.topk_idx)
            assert torch.equal(near(kept), wanted.topk_weights)
            bias = far(torch.zeros_like(mine.x))
            out, out_weights, _ = normal.combine(rows, handle, kept, bias)
            assert torch.equal(near(out), sums[rank])
            assert torch.equal(near(out_weights), mine.topk_weights)
            rows, chosen, _, made, _ = elastic.dispatch(x, topk_idx, num_experts=5)
            assert torch.equal(near(rows), wanted.x)
            assert torch.equal(near(elastic.combine(rows, made)[0]), sums[rank])
        dist.barrier(group)
        return True

    assert ranks(2, work) == [True, True]


def test_the_wrapper_has_no_address() -> None:
    assert far(torch.ones(3)).data_ptr() == 0
