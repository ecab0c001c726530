"""Ranks that die, stop, come back and arrive, at any point of any operation."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import pg

PLACES = [None, "apart"]

WORLD = 4
COUNT = 40_000
PLENTY_S = 100.0  # of waits that a healthy run never comes near


def start(rank: int, world: int, folder: Path, **options: Any) -> Any:
    active = torch.ones(options.get("max_group_size") or world, dtype=torch.int32)
    dist.init_process_group(
        "mooncake",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PLENTY_S),
        pg_options=pg.MooncakeBackendOptions(active, **options),
    )
    return dist.group.WORLD


def one_of_each(rank: int, world: int, value: float) -> dict[str, list[float]]:
    """Run every kind of collective; returns what each gave, or the name of its error."""
    tensor = torch.full((COUNT,), value)
    outs = [torch.full((COUNT,), -1.0) for _ in range(world)]
    big = torch.full((COUNT, world), value)
    kinds = {
        "all_reduce": lambda: dist.all_reduce(tensor.clone(), async_op=True),
        "all_gather": lambda: dist.all_gather(outs, tensor, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(
            torch.empty(world * 9), torch.ones(world * 9), async_op=True
        ),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(COUNT), big.view(-1), async_op=True),
        "broadcast": lambda: dist.broadcast(tensor.clone(), 1, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }
    found = {}
    for name, call in kinds.items():
        work = call()
        try:
            sums = [float(output.double().sum()) for output in work.result()]
        except pg.RankFailed:
            sums = ["RankFailed"]
        found[name] = [pg.get_failed_ranks_hint(work), sums, work.contributors]
    return found


def struck_ranks(rank: int, world: int, folder: Path, point: str, nth: int, victim: int) -> list[Any]:
    group = start(rank, world, folder)
    if rank == victim:
        pg.inject_fault(group, pg.FaultPoint[point], nth)
    log = [one_of_each(rank, world, float(rank + step + 1)) for step in range(2)]
    active = pg.get_active_ranks(group).tolist()
    return [log, active, group.options.active_ranks.tolist()]


@pytest.mark.parametrize(
    ("point", "nth", "victim"),
    [
        ("BEFORE_PUBLISH", 1, 0),
        ("BEFORE_PUBLISH", 5, 1),
        ("AFTER_PUBLISH", 1, 3),
        ("WHILE_READING", 6, 2),
        ("BEFORE_RESULT", 1, 1),
        ("BEFORE_RETURN", 1, 0),
    ],
)
def test_survivors_of_a_kill_agree_on_contributors_and_results(
    launch: Any, point: str, nth: int, victim: int
) -> None:
    survivors = [rank for rank in range(WORLD) if rank != victim]
    ranks = launch(struck_ranks, WORLD, point=point, nth=nth, victim=victim)
    logs = ranks.results(survivors)
    ranks.gone(victim)
    for log, active, shown in logs:
        assert active == shown == [int(rank != victim) for rank in range(WORLD)]
        hints = [hint for step in log for hint, _, _ in step.values()]
        assert hints.count([victim]) == 1, "it is out of one operation, and no member of those that follow"
        assert all(hint in ([], [victim]) for hint in hints)
    # What a rank gets by its place differs; all else is equal, to the bit.
    for step in range(2):
        for kind in ("all_reduce", "all_gather", "broadcast"):
            assert len({str(log[step][kind]) for log, _, _ in logs}) == 1
        _, (total,), contributors = logs[0][0][step]["all_reduce"]
        counted = survivors if contributors is None and step else contributors or range(WORLD)
        assert total == COUNT * sum(rank + step + 1.0 for rank in counted)


def stopped_ranks(rank: int, world: int, folder: Path) -> Any:
    group = start(rank, world, folder)
    first = sum_of_all(rank)
    (folder / f"at{rank}").touch()
    if rank == 1:
        pg.inject_fault(group, pg.FaultPoint.BEFORE_PUBLISH, kill=False)
        try:
            sum_of_all(rank)
        except pg.RankEvicted as error:
            pg.join_group(group)
            return [first, str(error), sum_of_all(rank)]
        return None
    # Of two ranks the other one is stopped: nobody else can be taken for late, however slow the machine is.
    wait_until((folder / "stopped").exists)
    status = pg.sync_after_failure(group, timeout=0.2)
    without = sum_of_all(rank)
    (folder / f"on{rank}").touch()
    wait_until(lambda: pg.get_peer_state(group, [1])[0])
    response = pg.recover_ranks(group, [1])
    return [first, status.name, without, list(response.ranks), sum_of_all(rank)]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PLENTY_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def sum_of_all(rank: int) -> float:
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def test_a_stopped_rank_is_fenced_and_comes_back_in_its_place(launch: Any) -> None:
    ranks = launch(stopped_ranks, 2)
    ranks.wait_for("at1")
    state = Path(f"/proc/{ranks.pids[1]}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    (ranks.folder / "stopped").touch()
    ranks.wait_for("on0")
    ranks.signal(1, signal.SIGCONT)
    one, fenced = ranks.results()
    assert one == [3.0, "Applied", 1.0, [1], 3.0]
    assert "was too late" in fenced[1]
    assert (fenced[0], fenced[2]) == (3.0, 3.0)


def replaced_ranks(rank: int, world: int, folder: Path, comes_later: bool = False) -> Any:
    group = start(rank, world, folder, is_extension=comes_later)
    if not comes_later:
        sum_of_all(rank)
        (folder / f"first{rank}").touch()
        wait_until(lambda: not pg.get_peer_state(group, [0])[0])
        without = sum_of_all(rank)
        (folder / f"without{rank}").touch()
        wait_until(lambda: pg.get_peer_state(group, [0])[0])
        response = pg.recover_ranks(group, [0])
        assert response.status is pg.ProposalStatus.Applied
    else:
        assert sum_of_all(rank) == rank + 1.0  # alone until it has joined
        pg.join_group(group)
        without = None
    message = torch.tensor([float(rank)])
    if rank == 0:
        dist.send(message, 2)
    elif rank == 2:
        dist.recv(message, 0)
    return [without, sum_of_all(rank), message.item(), group.options.active_ranks.tolist()]


def test_a_process_takes_the_place_of_the_dead_one_also_of_rank_0(launch: Any) -> None:
    ranks = launch(replaced_ranks, 3)
    for rank in range(3):
        ranks.wait_for(f"first{rank}")
    ranks.signal(0, signal.SIGKILL)
    ranks.wait_for("without1")
    ranks.wait_for("without2")
    (new,) = launch(replaced_ranks, 3, ranks=[0], comes_later=True).results()
    assert new == [None, 6.0, 0.0, [1, 1, 1]]
    assert ranks.results([1, 2]) == [[5.0, 6.0, 1.0, [1, 1, 1]], [5.0, 6.0, 0.0, [1, 1, 1]]]


def growing_ranks(rank: int, world: int, folder: Path, first: int) -> Any:
    comes_later = rank >= first
    group = start(
        rank, world if comes_later else first, folder, is_extension=comes_later, max_group_size=world
    )
    sizes = [dist.get_world_size()]
    if comes_later:
        pg.join_group(group)
    else:
        new = list(range(first, world))
        (folder / f"ready{rank}").touch()
        wait_until(lambda: all(pg.get_peer_state(group, new)))
        assert pg.recover_ranks(group, new).ranks == tuple(new)
    sizes.append(dist.get_world_size())
    total = sum_of_all(rank)
    if rank == 1:
        (folder / "summed").touch()
        try:
            pg.deactivate_ranks(group, [1])
        except pg.RankEvicted:
            return [sizes, total, "out"]
    wait_until((folder / "summed").exists)
    pg.deactivate_ranks(group, [1])
    parts = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(parts, torch.tensor([rank + 1.0]))
    return [sizes, total, [part.item() for part in parts]]


def test_a_group_grows_and_shrinks_and_keeps_holes(launch: Any) -> None:
    old = launch(growing_ranks, 4, ranks=[0, 1], first=2)
    old.wait_for("ready0")
    new = launch(growing_ranks, 4, ranks=[2, 3], first=2)
    hole = [1.0, 0.0, 3.0, 4.0]
    assert old.results() == [[[2, 4], 10.0, hole], [[2, 4], 10.0, "out"]]
    assert new.results() == [[[4, 4], 10.0, hole]] * 2


def died_joining_ranks(rank: int, world: int, folder: Path, comes_later: bool = False) -> Any:
    group = start(
        rank, world if comes_later else world - 1, folder, is_extension=comes_later, max_group_size=world
    )
    if comes_later:
        pg.inject_fault(group, pg.FaultPoint.BEFORE_JOIN)
        pg.join_group(group)
    (folder / f"ready{rank}").touch()
    wait_until(lambda: pg.get_peer_state(group, [world - 1])[0])
    pg.recover_ranks(group, [world - 1])
    return [sum_of_all(rank), pg.get_active_ranks(group).tolist()]


def test_a_rank_that_dies_while_it_is_let_in_is_out_again(launch: Any) -> None:
    ranks = launch(died_joining_ranks, 3, ranks=[0, 1])
    ranks.wait_for("ready0")
    launch(died_joining_ranks, 3, ranks=[2], comes_later=True)
    assert ranks.results() == [[3.0, [1, 1, 0]]] * 2


def absent_ranks(rank: int, world: int, folder: Path) -> Any:
    group = start(rank, world, folder, max_group_size=world + 1)
    response = pg.recover_ranks(group, [world])
    try:
        pg.extend_group_size_to(group, world + 2)
    except pg.GroupUnavailable as error:
        return [response.status.name, response.reject_reason, sum_of_all(rank), str(error)]
    return None


def test_nobody_is_let_in_who_is_not_there(launch: Any) -> None:
    for status, reason, total, error in launch(absent_ranks, 2).results():
        assert (status, total) == ("Rejected", 3.0)
        assert "[2]" in reason
        assert "room for 3 ranks, not 4" in error


def forked_ranks(rank: int, world: int, folder: Path) -> list[float]:
    start(rank, world, folder)
    dist.all_reduce(torch.ones(1), async_op=True)  # starts a thread, which a child has not
    first = sum_of_all(rank)
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()
        os._exit(0)
    os.waitpid(child, 0)
    return [first, sum_of_all(rank)]


def test_a_forked_child_does_not_take_its_parent_out_of_the_group(launch: Any) -> None:
    assert launch(forked_ranks, 2).results() == [[3.0, 3.0]] * 2


def shrunk_ranks(rank: int, world: int, folder: Path) -> Any:
    start(rank, world, folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    smaller = pg.shrink_group([1])
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor, group=smaller)
    return [smaller.rank(), dist.get_world_size(smaller), tensor.item(), sum_of_all(rank)]


def test_those_who_are_left_make_a_smaller_group(launch: Any) -> None:
    ranks = launch(shrunk_ranks, 3)
    assert ranks.results([0, 2]) == [[0, 2, 4.0, 4.0], [1, 2, 4.0, 4.0]]
