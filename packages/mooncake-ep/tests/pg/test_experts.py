"""Experts behind a process group whose ranks die, are replaced and become more."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mooncake_ep import Buffer, pg

EXPERTS, HIDDEN, PLENTY_S = 6, 128, 100.0


def start(rank: int, world: int, folder: Path, comes_later: bool, most: int) -> Any:
    options = pg.MooncakeBackendOptions(
        torch.ones(most, dtype=torch.int32), is_extension=comes_later, max_group_size=most
    )
    store = f"file://{folder}/store"
    dist.init_process_group(
        "mooncake", init_method=store, rank=rank, world_size=world,
        timeout=timedelta(seconds=PLENTY_S), pg_options=options,
    )  # fmt: skip
    return dist.group.WORLD


def round_trip(buffer: Buffer, rank: int) -> list[float]:
    """One token to each expert and back; each expert answers with what came."""
    x = torch.full((EXPERTS, HIDDEN), rank + 1.0).bfloat16()
    topk_idx = torch.arange(EXPERTS)[:, None].contiguous()
    received, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, EXPERTS, EXPERTS, use_fp8=False)
    combined, _, _ = buffer.low_latency_combine(received, topk_idx, torch.ones(EXPERTS, 1), handle)
    return [float(one) for one in combined[:, 0]]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PLENTY_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def serving_ranks(rank: int, world: int, folder: Path, comes_later: bool = False) -> Any:
    """Three ranks; rank 1 is killed and replaced, then a fourth arrives."""
    group = start(rank, world, folder, comes_later, 4)
    results = []
    if comes_later:
        pg.join_group(group)
        buffer = Buffer(group)
        results.append(round_trip(buffer, rank))
        if rank == 3:
            return results
    else:
        buffer = Buffer(group)
        results.append(round_trip(buffer, rank))
        (folder / f"first{rank}").touch()
        wait_until(lambda: not pg.get_peer_state(group, [1])[0])
        results.append(round_trip(buffer, rank))
        dist.all_reduce(torch.ones(1))  # the group, too, notices that a rank is gone
        (folder / f"without{rank}").touch()
        wait_until(lambda: pg.get_peer_state(group, [1])[0])
        pg.recover_ranks(group, [1])
        buffer.update_ep_member()
        results.append(round_trip(buffer, rank))
    (folder / f"again{rank}").touch()
    wait_until(lambda: pg.get_peer_state(group, [3])[0])
    pg.recover_ranks(group, [3])
    buffer.update_ep_member()
    return [*results, round_trip(buffer, rank)]


def test_experts_go_on_without_a_rank_with_its_successor_and_with_one_more(launch: Any) -> None:
    ranks = launch(serving_ranks, 3)
    for rank in range(3):
        ranks.wait_for(f"first{rank}")
    ranks.signal(1, signal.SIGKILL)
    for rank in (0, 2):
        ranks.wait_for(f"without{rank}")
    successor = launch(serving_ranks, 3, ranks=[1], comes_later=True)
    for rank in range(3):
        ranks.wait_for(f"again{rank}")
    fourth = launch(serving_ranks, 4, ranks=[3], comes_later=True)
    for rank, found in zip((0, 2), ranks.results([0, 2]), strict=True):
        whole = [rank + 1.0] * EXPERTS
        assert found == [whole, [*whole[:2], 0.0, 0.0, *whole[4:]], whole, whole]
    assert successor.results() == [[[2.0] * EXPERTS] * 2]
    assert fourth.results() == [[[4.0] * EXPERTS]]
