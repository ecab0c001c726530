"""One rank of a dispatch and combine, by this project and over gloo, by turns, in the same processes.

The peer does what there is without this package: torch.distributed's all_to_all_single over gloo for counts
and rows, torch indexing for what goes where and for the sums. Experts change nothing, on either side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mooncake_ep import Buffer

TOKENS, HIDDEN, TOPK, EXPERTS = 128, 7168, 8, 256
CALLS = 3
Call = Callable[[], torch.Tensor]


class Tokens:
    """What one rank dispatches."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        self.topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
        self.weights = torch.rand(TOKENS, TOPK, generator=generator)


def over_gloo(group: dist.ProcessGroup, tokens: Tokens) -> torch.Tensor:
    """A row for every chosen expert, grouped by expert, and back."""
    size = dist.get_world_size(group)
    experts = tokens.topk_idx.flatten()
    order = experts.argsort(stable=True)
    sent = torch.bincount(experts, minlength=EXPERTS)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_send, to_receive = (one.view(size, -1).sum(1).tolist() for one in (sent, received))
    rows = torch.empty(sum(to_receive), HIDDEN, dtype=torch.bfloat16)
    dist.all_to_all_single(rows, tokens.x[order // TOPK], to_receive, to_send, group=group)
    by_expert = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(received).argsort(stable=True)
    grouped = rows[by_expert]
    rows[by_expert] = grouped
    returned = torch.empty(len(order), HIDDEN, dtype=torch.bfloat16)
    dist.all_to_all_single(returned, rows, to_send, to_receive, group=group)
    mine = torch.empty_like(returned)
    mine[order] = returned
    return (mine.view(TOKENS, TOPK, HIDDEN).float() * tokens.weights[..., None]).sum(1).bfloat16()


def ours(
    buffer: Buffer, tokens: Tokens, *, use_fp8: bool, in_place: bool, results: bool = False
) -> torch.Tensor:
    """The same in the low-latency mode.

    `in_place`: experts left their results where other ranks read them; `results`: and they are the rows.
    """
    received, _, handle, _, _ = buffer.low_latency_dispatch(
        tokens.x, tokens.topk_idx, TOKENS, EXPERTS, use_fp8=use_fp8
    )
    rows = received if isinstance(received, torch.Tensor) else received[0]
    if in_place:
        target = buffer.get_next_low_latency_combine_buffer(handle)
        rows = target.copy_(rows) if results else target
    return buffer.low_latency_combine(rows, tokens.topk_idx, tokens.weights, handle, zero_copy=in_place)[0]


def measure(calls: dict[str, Call], group: dist.ProcessGroup, rounds: int) -> dict[str, float]:
    """Median microseconds of a call of each, by turns; the slowest rank of a round counts."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier(group)
            began = time.perf_counter()
            for _ in range(CALLS):
                calls[name]()
            took = torch.tensor((time.perf_counter() - began) / CALLS * 1e6)
            dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
            if number:  # in the first, memory is touched for the first time
                seen[name].append(float(took))
    return {name: statistics.median(values) for name, values in seen.items()}


def check(buffer: Buffer, tokens: Tokens, group: dist.ProcessGroup) -> None:
    """Both give the same sums."""
    peers = over_gloo(group, tokens).float()
    for in_place in (False, True):
        found = ours(buffer, tokens, use_fp8=False, in_place=in_place, results=True).float()
        apart = float((found - peers).abs().max())
        if apart > 0.1:
            raise SystemExit(f"sums differ by {apart}")


def main() -> None:
    """Join the group, measure, and let rank 0 say what was found."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "size", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--store", required=True)
    given = parser.parse_args()
    from mooncake_ep import Buffer

    torch.set_num_threads(1)
    store = dist.FileStore(given.store, given.size)
    dist.init_process_group("gloo", store=store, rank=given.rank, world_size=given.size)
    group = dist.group.WORLD
    assert group is not None
    buffer, tokens = Buffer(group), Tokens(given.rank)
    check(buffer, tokens, group)
    calls: dict[str, Call] = {
        "gloo": lambda: over_gloo(group, tokens),
        "copied": lambda: ours(buffer, tokens, use_fp8=False, in_place=False),
        "bf16": lambda: ours(buffer, tokens, use_fp8=False, in_place=True),
        "fp8": lambda: ours(buffer, tokens, use_fp8=True, in_place=True),
    }
    found = measure(calls, group, given.rounds)
    if given.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.barrier(group)


if __name__ == "__main__":
    main()
