"""Ranks are killed and stopped at random, others take their places; all who were there agree on each step.

`pytest packages/mooncake-ep/tests/pg --kills 200 -k churn` goes on for longer.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import pg

WORLD = 3
SIZES = (1, 3000, 40_000)
PLENTY_S = 100.0


def churned_ranks(rank: int, world: int, folder: Path, life: int) -> list[Any]:
    """Reduce until the test says that it is over; the log of a life is a line of each step that ended."""
    options = pg.MooncakeBackendOptions(world, is_extension=life > 0)
    dist.init_process_group(
        "mooncake",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PLENTY_S),
        pg_options=options,
    )
    group: Any = dist.group.WORLD
    if life:
        pg.join_group(group)
    with (folder / f"{rank}.{life}.log").open("w") as log:
        step = agreed_step(0)
        while True:
            work = reduced(rank, step, SIZES[step % len(SIZES)])
            log.write(
                json.dumps([step, work.contributors or group.members, work.result()[0][0].item()]) + "\n"
            )
            log.flush()
            over = torch.tensor([int((folder / "over").exists())])
            dist.all_reduce(over, dist.ReduceOp.MAX)
            if over.item():
                return group.members
            step += 1
            if step % 20 == 0:
                pg.recover_ranks(group, list(range(world)))
                step = agreed_step(step)


def agreed_step(step: int) -> int:
    """Steps of who was here; whoever comes later begins there."""
    tensor = torch.tensor([step])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor.item())


def reduced(rank: int, step: int, count: int) -> Any:
    work = dist.all_reduce(torch.full((count,), float(100**rank * (step % 7 + 1))), async_op=True)
    work.wait()
    return work


def wait_for_steps(folder: Path, more: int) -> None:
    """Wait until the ranks together have ended so many steps more."""

    def ended() -> int:
        return sum(file.read_text().count("\n") for file in folder.glob("*.log"))

    least, deadline = ended() + more, time.monotonic() + PLENTY_S
    while ended() < least:
        failed = list(folder.glob("*.failed"))
        assert not failed, failed[0].read_text()
        assert time.monotonic() < deadline, "nobody goes on"
        time.sleep(0.01)


def test_churn_leaves_no_two_ranks_with_different_results(
    launch: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = time.time_ns() % 10**6
    chance = random.Random(seed)
    lives = [launch(churned_ranks, WORLD, life=0)]
    holder = {rank: lives[0] for rank in range(WORLD)}
    for life in range(1, request.config.getoption("--kills", 2) + 1):
        wait_for_steps(tmp_path, chance.randrange(60, 120))
        victim = chance.randrange(WORLD)
        if chance.random() < 0.3:
            holder[victim].signal(victim, signal.SIGSTOP)
            wait_for_steps(tmp_path, 0)
        holder[victim].signal(victim, signal.SIGKILL)
        holder[victim].gone(victim)
        holder[victim] = launch(churned_ranks, WORLD, ranks=[victim], life=life)
        holder[victim].wait_for(f"{victim}.{life}.log")
    (tmp_path / "over").touch()
    for rank, ranks in holder.items():
        assert ranks.results([rank]) == [[0, 1, 2]], f"seed {seed}"
    check_logs(tmp_path, seed)


def check_logs(folder: Path, seed: int) -> None:
    said: dict[int, list[Any]] = defaultdict(list)
    for file in folder.glob("*.log"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last line of one that was killed
                step, contributors, value = json.loads(line)
                said[step].append((contributors, value))
    assert max(len(found) for found in said.values()) == WORLD
    for step, found in said.items():
        contributors, value = found[0]
        assert all(one == found[0] for one in found), f"seed {seed}, step {step}: {found}"
        assert value == sum(100.0**rank * (step % 7 + 1) for rank in contributors), (
            f"seed {seed}, step {step}"
        )
