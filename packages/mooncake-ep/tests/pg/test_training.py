"""What torch builds on a process group: data parallel training, device meshes, functional collectives."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mooncake_ep.pg  # noqa: F401 - registers the backend

WORLD = 2


def start(rank: int, world: int, folder: Path) -> None:
    warnings.simplefilter("default")  # torch's own
    dist.init_process_group(
        "mooncake",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=100),
    )


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))


def step(module: torch.nn.Module, data: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        module(data).square().mean().backward()
        optimizer.step()


def trained_alone() -> list[torch.Tensor]:
    module = network()
    step(module, torch.cat([batch(rank) for rank in range(WORLD)]))
    return [parameter.detach() for parameter in module.parameters()]


def same(left: Any, right: Any) -> bool:
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(left, right, strict=True))


def replicated_ranks(rank: int, world: int, folder: Path) -> bool:
    start(rank, world, folder)
    module = torch.nn.parallel.DistributedDataParallel(network())
    step(module, batch(rank))
    return same([parameter.detach() for parameter in module.parameters()], trained_alone())


def test_data_parallel_training_is_what_one_process_computes(launch: Any) -> None:
    assert launch(replicated_ranks, WORLD).results() == [True] * WORLD


def sharded_ranks(rank: int, world: int, folder: Path) -> bool:
    start(rank, world, folder)
    from torch.distributed.fsdp import fully_shard

    module = network()
    mesh = dist.init_device_mesh("cpu", (world,))
    fully_shard(module, mesh=mesh)
    step(module, batch(rank))
    shards: list[Any] = list(module.parameters())
    whole = [shard.full_tensor().detach() for shard in shards]
    return same(whole, trained_alone())


def test_fully_sharded_training_is_what_one_process_computes(launch: Any) -> None:
    assert launch(sharded_ranks, WORLD).results() == [True] * WORLD


def functional_ranks(rank: int, world: int, folder: Path) -> list[bool]:
    start(rank, world, folder)
    import torch.distributed._functional_collectives as functional
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (world,))
    base = torch.arange(12.0).view(4, 3)
    summed = functional.all_reduce(base + rank, "sum", mesh)
    gathered = functional.all_gather_tensor(base + rank, 0, mesh)
    scattered = functional.reduce_scatter_tensor(base, "sum", 0, mesh)
    exchanged = functional.all_to_all_single(base + rank, None, None, mesh)
    tensor = distribute_tensor(base, mesh, [Shard(0)])
    again = tensor.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local()
    product = (tensor @ distribute_tensor(base.T.contiguous(), mesh, [Replicate()])).full_tensor()
    rows = slice(2 * rank, 2 * rank + 2)
    return [
        torch.equal(summed, 2 * base + 1),
        torch.equal(gathered, torch.cat([base, base + 1])),
        torch.equal(scattered, 2 * base[rows]),
        torch.equal(exchanged, torch.cat([base[rows], base[rows] + 1])),
        torch.equal(again, base),
        torch.equal(product, base @ base.T),
    ]


def test_functional_collectives_and_distributed_tensors(launch: Any) -> None:
    assert launch(functional_ranks, WORLD).results() == [[True] * 6] * WORLD
