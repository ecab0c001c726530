"""Every collective of torch.distributed, beside what plain torch computes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import pg

PLACES = [None, "apart"]

WORLD = 3
LARGE = 40_000  # elements: several chunks, and reductions in two steps


def start(rank: int, world: int, folder: Path, backend: str = "mooncake") -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=100),
    )


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 50, (count,), generator=generator).to(dtype)


def expected(op: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """In float32 for 16-bit floats, in the order of ranks, rounded once."""
    dtype = inputs[0].dtype
    wide = [t.float() if dtype in (torch.float16, torch.bfloat16) else t for t in inputs]
    total = wide[0].clone()
    for tensor in wide[1:]:
        if op in ("SUM", "AVG"):
            total = total + tensor if dtype is not torch.bool else total | tensor
        elif op == "PRODUCT":
            total = total * tensor
        elif op in ("MIN", "MAX"):
            total = (torch.minimum if op == "MIN" else torch.maximum)(total, tensor)
        else:
            total = {"BAND": total & tensor, "BOR": total | tensor, "BXOR": total ^ tensor}[op]
    if op == "AVG":
        total = (
            total / len(inputs) if dtype.is_floating_point else total.div(len(inputs), rounding_mode="trunc")
        )
    return total.to(dtype)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def reductions_ranks(rank: int, world: int, folder: Path) -> list[str]:
    start(rank, world, folder)
    wrong = []
    cases = [(dtype, op) for dtype in FLOATS + INTS for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG")]
    cases += [(dtype, op) for dtype in [*INTS, torch.bool] for op in ("BAND", "BOR", "BXOR")]
    cases += [(torch.bool, "SUM"), (torch.complex64, "SUM"), (torch.complex128, "AVG")]
    for dtype, op in cases:
        for count in (37, LARGE) if op == "SUM" else (37,):
            inputs = [numbers(one, count, dtype) for one in range(world)]
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            want = (
                expected(op, inputs) if not dtype.is_complex else sum(inputs) / (1 if op == "SUM" else world)
            )
            if not (torch.equal(tensor, want) or (dtype.is_complex and torch.allclose(tensor, want))):
                wrong.append(f"{dtype} {op} {count}")
    return wrong


def test_reductions_are_to_the_bit_what_torch_computes_in_the_order_of_ranks(launch: Any) -> None:
    assert launch(reductions_ranks, WORLD).results() == [[]] * WORLD


def moving_ranks(rank: int, world: int, folder: Path) -> list[str]:
    start(rank, world, folder)
    wrong = []

    def check(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got, want):
            wrong.append(what)

    for count in (0, 5, LARGE):
        for dtype in (torch.float32, torch.bool, torch.complex64):
            all_inputs = [numbers(one, count * world, dtype) for one in range(world)]
            mine = all_inputs[rank]
            own = mine[:count].clone()
            parts = [torch.empty(count, dtype=dtype) for _ in range(world)]
            dist.all_gather(parts, own)
            check("all_gather", torch.cat(parts), torch.cat([t[:count] for t in all_inputs]))
            whole = torch.empty(count * world, dtype=dtype)
            dist.all_gather_into_tensor(whole, own)
            check("all_gather_into_tensor", whole, torch.cat(parts))
            for root in range(world):
                copied = own.clone()
                dist.broadcast(copied, root)
                check("broadcast", copied, all_inputs[root][:count])
                dist.scatter(
                    copied,
                    list(mine.chunk(world))
                    if rank == root and count
                    else ([torch.empty(0, dtype=dtype)] * world if rank == root else None),
                    root,
                )
                check("scatter", copied, all_inputs[root][rank * count : (rank + 1) * count])
                gathered = [torch.empty(count, dtype=dtype) for _ in range(world)] if rank == root else None
                dist.gather(own, gathered, root)
                if gathered is not None:
                    check("gather", torch.cat(gathered), torch.cat(parts))
            out = torch.empty_like(whole)
            dist.all_to_all_single(out, mine)
            cut = slice(rank * count, (rank + 1) * count)
            check("all_to_all_single", out, torch.cat([t[cut] for t in all_inputs]))
    return wrong


def test_bytes_come_where_they_belong(launch: Any) -> None:
    assert launch(moving_ranks, WORLD).results() == [[]] * WORLD


def uneven_ranks(rank: int, world: int, folder: Path) -> bool:
    start(rank, world, folder)
    rows = [[(src + 1) * (dst + 2) * 3000 for dst in range(world)] for src in range(world)]
    send = torch.cat([torch.full((rows[rank][dst], 2), float(10 * rank + dst)) for dst in range(world)])
    sizes = [rows[src][rank] for src in range(world)]
    received = torch.empty(sum(sizes), 2)
    dist.all_to_all_single(received, send, sizes, rows[rank])
    want = torch.cat([torch.full((rows[src][rank], 2), float(10 * src + rank)) for src in range(world)])
    lists = [torch.empty(size, 2) for size in sizes]
    dist.all_to_all(lists, list(send.split(rows[rank])))
    return torch.equal(received, want) and torch.equal(torch.cat(lists), want)


def test_all_to_all_moves_parts_of_any_size(launch: Any) -> None:
    assert launch(uneven_ranks, WORLD).results() == [True] * WORLD


def scattered_ranks(rank: int, world: int, folder: Path) -> list[bool]:
    start(rank, world, folder)
    inputs = [torch.arange(LARGE * world, dtype=torch.float32) * (one + 1) for one in range(world)]
    total = sum(inputs)
    assert isinstance(total, torch.Tensor)
    mine = total.chunk(world)[rank]
    out, listed = torch.empty(LARGE), torch.empty(LARGE)
    dist.reduce_scatter_tensor(out, inputs[rank])
    dist.reduce_scatter(listed, list(inputs[rank].chunk(world)))
    at_root = inputs[rank].clone()
    dist.reduce(at_root, 1)
    kept = torch.equal(at_root, total if rank == 1 else inputs[rank])
    gaps = inputs[rank].view(-1, 2)[:, 0]  # every other element of a tensor
    halved = inputs[rank].clone().view(-1, 2)[:, 0]
    dist.all_reduce(halved)
    scaled = torch.ones(4)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(2.0))
    return [
        torch.equal(out, mine),
        torch.equal(listed, mine),
        kept,
        torch.equal(halved, total.view(-1, 2)[:, 0]) and gaps.numel() == halved.numel(),
        scaled.tolist() == [2.0 * world] * 4,
    ]


def test_reductions_to_some_ranks_and_of_tensors_with_gaps(launch: Any) -> None:
    assert launch(scattered_ranks, WORLD).results() == [[True] * 5] * WORLD


def async_ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    start(rank, world, folder, "cpu:mooncake,cuda:mooncake")
    tensors = [torch.full((LARGE,), float(i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works[:3]]
    last = torch.ones(3)
    dist.all_reduce(last)  # after those that are under way
    sums = [bool((tensor == i * world).all()) for i, tensor in enumerate(tensors)]
    values = [float(future.wait()[0][0]) for future in futures]
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank * 1000)})
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, 2)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        pair = [torch.ones(2), torch.full((2,), 5.0)]
        for tensor in pair:
            dist.all_reduce(tensor)
    manager.wait()
    return {
        "sums": all(sums) and last.tolist() == [world] * 3,
        "values": values,
        "objects": [(one["rank"], len(one["text"])) for one in objects],
        "told": told,
        "coalesced": [tensor.tolist() for tensor in pair],
        "all completed": all(work.is_completed() for work in works),
    }


def test_work_under_way_ends_in_the_order_of_the_calls(launch: Any) -> None:
    assert (
        launch(async_ranks, WORLD).results()
        == [
            {
                "sums": True,
                "values": [0.0, 3.0, 6.0],
                "objects": [[one, one * 1000] for one in range(WORLD)],
                "told": ["from 2"],
                "coalesced": [[3.0, 3.0], [15.0, 15.0]],
                "all completed": True,
            }
        ]
        * WORLD
    )


def mismatched_ranks(rank: int, world: int, folder: Path) -> list[str]:
    start(rank, world, folder)
    errors = []
    for wrong in (
        lambda: dist.all_reduce(torch.ones(4 if rank else 5)),
        lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(1)),
    ):
        try:
            wrong()
        except pg.CollectiveMismatch as error:
            errors.append(str(error))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return [*errors, str(tensor.tolist())]


def test_ranks_that_call_different_collectives_are_told_and_go_on(launch: Any) -> None:
    for first, second, third in launch(mismatched_ranks, WORLD).results():
        assert "called another collective" in first
        assert "called another collective" in second
        assert third == "[3.0, 3.0]"


def subgroup_ranks(rank: int, world: int, folder: Path) -> list[float]:
    start(rank, world, folder)
    pair = dist.new_group([0, 2])
    alone = [dist.new_group([one]) for one in range(world)]
    tensor, single = torch.tensor([rank + 1.0]), torch.tensor([7.0])
    if rank != 1:
        dist.all_reduce(tensor, group=pair)
    dist.all_reduce(single, group=alone[rank])
    dist.barrier()
    dist.destroy_process_group()
    return [tensor.item(), single.item()]


def test_groups_of_some_ranks_work_beside_the_whole(launch: Any) -> None:
    assert launch(subgroup_ranks, WORLD).results() == [[4.0, 7.0], [2.0, 7.0], [4.0, 7.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bitwise_reduction_of_floats_is_refused_with_the_type(launch: Any, dtype: torch.dtype) -> None:
    (text,) = launch(refused_ranks, 1, dtype=str(dtype).removeprefix("torch.")).results()
    assert str(dtype) in text


def refused_ranks(rank: int, world: int, folder: Path, dtype: str) -> str:
    start(rank, world, folder)
    try:
        dist.all_reduce(torch.ones(2, dtype=getattr(torch, dtype)), dist.ReduceOp.BAND)
    except pg.GroupUnavailable as error:
        return str(error)
    return ""
