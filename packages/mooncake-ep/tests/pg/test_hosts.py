"""Ranks on two hosts, two on each: network namespaces with a wire between them."""

from __future__ import annotations

import json
import runpy
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import pg

WORLD = 4
COUNT = 300_000
PLENTY_S = 100.0
RESUME_S = 1.0


@pytest.fixture(scope="module")
def place() -> Iterator[list[str]]:
    """The namespace of each rank."""
    hosts = runpy.run_path(str(Path(__file__).with_name("hosts.py")))
    try:
        with hosts["two_hosts"]() as (one, other):
            yield [one, one, other, other]
    except hosts["NoHosts"] as reason:
        pytest.skip(str(reason))


def start(rank: int, world: int, folder: Path, **options: Any) -> Any:
    dist.init_process_group(
        "mooncake",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PLENTY_S),
        pg_options=pg.MooncakeBackendOptions(torch.ones(world, dtype=torch.int32), **options),
    )
    return dist.group.WORLD


def every_ranks(rank: int, world: int, folder: Path) -> list[str]:
    start(rank, world, folder)
    wrong = []

    def check(what: str, right: bool) -> None:
        if not right:
            wrong.append(what)

    inputs = [torch.arange(COUNT * world, dtype=torch.float32) * (one + 1) for one in range(world)]
    total = torch.stack(inputs).sum(0)
    mine, cut = inputs[rank], slice(rank * COUNT, (rank + 1) * COUNT)
    for count in (3, COUNT):
        tensor = mine[:count].clone()
        dist.all_reduce(tensor)
        check(f"all_reduce {count}", torch.equal(tensor, total[:count]))
        parts = [torch.empty(count) for _ in range(world)]
        dist.all_gather(parts, mine[:count])
        check(
            f"all_gather {count}", all(torch.equal(p, i[:count]) for p, i in zip(parts, inputs, strict=True))
        )
        for root in (0, 3):
            copied = mine[:count].clone()
            dist.broadcast(copied, root)
            check(f"broadcast {count}", torch.equal(copied, inputs[root][:count]))
            reduced = mine[:count].clone()
            dist.reduce(reduced, root)
            check(f"reduce {count}", torch.equal(reduced, total[:count] if rank == root else mine[:count]))
    out = torch.empty(COUNT)
    dist.reduce_scatter_tensor(out, mine)
    check("reduce_scatter", torch.equal(out, total[cut]))
    whole = torch.empty(COUNT * world)
    dist.all_to_all_single(whole, mine)
    check("all_to_all", torch.equal(whole, torch.cat([tensor[cut] for tensor in inputs])))
    right, left = (rank + 1) % world, (rank - 1) % world
    work = dist.isend(mine, right, tag=3)
    dist.recv(whole, left, tag=3)
    assert work is not None
    work.wait()
    check("message", torch.equal(whole, inputs[left]))
    return wrong


def test_every_collective_brings_the_same_as_on_one_host(launch: Any, place: list[str]) -> None:
    assert launch(every_ranks, WORLD, place=place).results() == [[]] * WORLD


def reducing_ranks(rank: int, world: int, folder: Path, count: int) -> Any:
    """Reduce for ever, and write down what came of each; the test ends it."""
    group = start(rank, world, folder)
    with (folder / f"{rank}.log").open("w") as log:
        for step in range(10**9):
            work = dist.all_reduce(torch.full((count,), float(10**rank * (step % 3 + 1))), async_op=True)
            work.wait()
            value = work.result()[0]
            line = [step, work.contributors or group.members, value[0].item(), value[-1].item()]
            log.write(json.dumps([*line, time.monotonic()]) + "\n")
            log.flush()


def steps(folder: Path, rank: int) -> list[Any]:
    lines = (
        (folder / f"{rank}.log").read_text().splitlines(keepends=True)
        if (folder / f"{rank}.log").exists()
        else []
    )
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_until(condition: Any, why: str) -> None:
    deadline = time.monotonic() + PLENTY_S
    while not condition():
        assert time.monotonic() < deadline, why
        time.sleep(0.002)


@pytest.mark.parametrize(("victim", "count"), [(0, 2), (3, 2), (1, COUNT), (2, COUNT)])
def test_survivors_of_a_kill_go_on_within_a_second_and_agree_on_every_step(
    launch: Any, place: list[str], tmp_path: Path, victim: int, count: int
) -> None:
    ranks = launch(reducing_ranks, WORLD, place=place, count=count)
    wait_until(lambda: all(len(steps(tmp_path, rank)) > 5 for rank in range(WORLD)), "they do not begin")
    killed = time.monotonic()
    ranks.signal(victim, signal.SIGKILL)
    left = [rank for rank in range(WORLD) if rank != victim]

    def without(rank: int) -> list[float]:
        return [step[-1] for step in steps(tmp_path, rank) if victim not in step[1]]

    wait_until(lambda: all(len(without(rank)) > 3 for rank in left), "they do not go on")
    assert max(without(rank)[0] for rank in left) - killed < RESUME_S
    said: dict[int, Any] = {}
    for rank in left:
        for step, contributors, first, last, _ in steps(tmp_path, rank):
            assert said.setdefault(step, (contributors, first, last)) == (contributors, first, last)
            assert first == last == sum(10.0**one * (step % 3 + 1) for one in contributors)


def stopped_ranks(rank: int, world: int, folder: Path) -> Any:
    group = start(rank, world, folder)
    first = sum_of_all(rank)
    (folder / f"at{rank}").touch()
    if rank == 1:
        wait_until((folder / "stopped").exists, "it is not told to go on")
        try:
            sum_of_all(rank)
        except pg.RankEvicted as error:
            pg.join_group(group)
            return [first, str(error), sum_of_all(rank)]
        return None
    wait_until((folder / "stopped").exists, "nobody stops")
    status = pg.sync_after_failure(group, timeout=0.5)
    without = sum_of_all(rank)
    (folder / f"on{rank}").touch()
    wait_until(lambda: pg.get_peer_state(group, [1])[0], "it does not come back")
    return [first, status.name, without, list(pg.recover_ranks(group, [1]).ranks), sum_of_all(rank)]


def sum_of_all(rank: int) -> float:
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def test_a_stopped_rank_is_evicted_hears_of_it_and_comes_back(launch: Any, place: list[str]) -> None:
    ranks = launch(stopped_ranks, WORLD, place=place)
    for rank in range(WORLD):
        ranks.wait_for(f"at{rank}")
    ranks.signal(1, signal.SIGSTOP)
    (ranks.folder / "stopped").touch()
    for rank in (0, 2, 3):
        ranks.wait_for(f"on{rank}")
    ranks.signal(1, signal.SIGCONT)
    zero, one, two, three = ranks.results()
    assert zero == two == three == [10.0, "Applied", 8.0, [1], 10.0]
    assert "was too late" in one[1]
    assert (one[0], one[2]) == (10.0, 10.0)
