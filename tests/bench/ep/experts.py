"""Rows of the expert-parallel half: dispatch and combine beside gloo, and placement beside DeepSeek's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rows import RATIO, VALUE, Row, Target

__all__ = ["dispatch_rows", "placement_rows"]

AGENT = Path(__file__).parents[1] / "agents" / "ep_experts.py"
LIMIT_S = 300
LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 288, 32


def measured(size: int, rounds: int) -> dict[str, float]:
    """Microseconds of a call of each contestant, from ranks that are ended whatever happens."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for rank in range(size):
                command = [sys.executable, str(AGENT), "--rank", str(rank), "--size", str(size)]
                command += ["--rounds", str(rounds), "--store", f"{folder}/store"]
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            told, _ = started[0].communicate(timeout=LIMIT_S)
            found: dict[str, float] = json.loads(told)
            for process in started:
                process.wait(LIMIT_S)
            return found
        finally:
            for process in started:
                process.kill()
                process.wait(10)


def dispatch_rows(size: int, quick: bool) -> list[Row]:
    """128 tokens of 7168 channels to 8 of 256 experts each, and back; microseconds."""
    found = measured(size, 3 if quick else 9)
    what = f"dispatch and combine 128 x 7168, top 8, {size} ranks"
    tenth = Target(RATIO, at_most=0.1)
    fp8, bf16 = found["fp8"], found["bf16"]
    return [
        Row("ep", f"{what}, results read in place", "us", bf16, "gloo", found["gloo"], tenth),
        Row("ep", f"{what}, results copied", "us", found["copied"], "gloo", found["gloo"], tenth),
        Row("ep", f"{what}, fp8", "us", fp8, "ours, bf16", bf16, Target(RATIO, at_most=1.0)),
    ]


def placement_rows() -> list[Row]:
    """A model's layers after loads changed by half: time, evenness and copies beside DeepSeek's placement."""
    import torch

    from mooncake_ep import eplb

    generator = torch.Generator().manual_seed(1)
    old = torch.exp(torch.randn(LAYERS, EXPERTS, generator=generator)) * 1000
    new = old * torch.exp(0.5 * torch.randn(LAYERS, EXPERTS, generator=generator))
    machine = [SLOTS // RANKS] * RANKS
    before, _, _ = eplb.rebalance_experts(old, SLOTS, 1, 1, RANKS)
    theirs, _, _ = eplb.rebalance_experts(new, SLOTS, 1, 1, RANKS)
    took = []
    for _ in range(9):
        began = time.perf_counter()
        plan = eplb.rebalance(new, machine, current=before)
        took.append((time.perf_counter() - began) * 1e3)
    ours, peers = (
        float(eplb.max_over_mean(new, table, machine).mean()) for table in (plan.physical_to_logical, theirs)
    )
    # What a rank gets that it had not, however its slots are ordered.
    held = [one.view(LAYERS, RANKS, -1) for one in (before, theirs)]
    kept = (held[1][..., None] == held[0][..., None, :]).any(-1)
    copies = int((~kept).sum())
    what = f"placement, {LAYERS} layers, {EXPERTS} experts, {SLOTS} slots, {RANKS} ranks"
    peer = "DeepSeek's"
    quarter, no_worse = Target(RATIO, at_most=0.25), Target(RATIO, at_most=1.0)
    return [
        Row("ep", f"{what}: time", "ms", sorted(took)[len(took) // 2], target=Target(VALUE, at_most=50.0)),
        Row("ep", f"{what}: heaviest rank over mean", "", ours, peer, peers, no_worse),
        Row("ep", f"{what}: copies", "", float(len(plan.moves)), peer, float(copies), quarter),
    ]
