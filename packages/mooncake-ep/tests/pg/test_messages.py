"""Messages between two ranks."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mooncake_ep import pg

PLACES = [None, "apart"]

LARGE = 300_000  # elements: more than a ring holds


def start(rank: int, world: int, folder: Path) -> Any:
    dist.init_process_group(
        "mooncake-cpu",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=100),
    )
    return dist.group.WORLD


def tagged_ranks(rank: int, world: int, folder: Path) -> list[Any]:
    start(rank, world, folder)
    if rank == 0:
        for tag in (1, 2, 1):
            dist.send(torch.full((LARGE if tag == 2 else 3,), float(tag)), 1, tag=tag)
        return []
    got = []
    for tag, count in ((2, LARGE), (1, 3), (1, 3)):
        tensor = torch.zeros(count)
        dist.recv(tensor, 0, tag=tag)
        got.append([tensor.min().item(), tensor.max().item()])
    return got


def test_messages_are_matched_by_tag_in_the_order_of_sending(launch: Any) -> None:
    assert launch(tagged_ranks, 2).results() == [[], [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]]


def crossing_ranks(rank: int, world: int, folder: Path) -> list[Any]:
    start(rank, world, folder)
    right, left = (rank + 1) % world, (rank - 1) % world
    sent = [torch.full((LARGE,), float(10 * rank + i)) for i in range(3)]
    got = [torch.zeros(LARGE) for _ in range(3)]
    ops = [dist.P2POp(dist.isend, tensor, right) for tensor in sent]
    ops += [dist.P2POp(dist.irecv, tensor, left) for tensor in got]
    works = dist.batch_isend_irecv(ops)
    total = torch.ones(1)
    dist.all_reduce(total)  # while they are under way
    for work in works:
        work.wait()
    return [total.item(), *[[tensor.min().item(), tensor.max().item()] for tensor in got]]


def test_large_messages_cross_each_other_beside_collectives(launch: Any) -> None:
    for rank, result in enumerate(launch(crossing_ranks, 3).results()):
        left = float(10 * ((rank - 1) % 3))
        assert result == [3.0, *[[left + i, left + i] for i in range(3)]]


def anyone_ranks(rank: int, world: int, folder: Path) -> Any:
    start(rank, world, folder)
    if rank:
        dist.send(torch.full((2,), float(rank)), 0, tag=5)
        return None
    found = {}
    for _ in range(world - 1):
        tensor = torch.zeros(2)
        source = dist.recv(tensor, tag=5)
        found[str(source)] = tensor.tolist()
    return found


def test_a_message_from_anyone_says_whose_it_is(launch: Any) -> None:
    assert launch(anyone_ranks, 4).results([0]) == [{str(rank): [float(rank)] * 2 for rank in (1, 2, 3)}]


def left_ranks(rank: int, world: int, folder: Path) -> Any:
    group = start(rank, world, folder)
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(4), 0)
        (folder / "sent").touch()
        dist.recv(torch.zeros(1), 0, tag=9)  # until it is killed
    tensor = torch.zeros(4)
    while not (folder / "killed").exists():
        pass
    dist.recv(tensor, 1)
    errors = []
    for receive in (lambda: dist.recv(torch.zeros(4), 1), lambda: dist.recv(torch.zeros(4))):
        try:
            receive()
        except pg.RankFailed as error:
            errors.append(str(error))
    work = dist.isend(torch.ones(LARGE), 1)
    assert work is not None
    work.wait()
    return [
        tensor.tolist(),
        errors,
        pg.get_local_success(work),
        pg.get_failed_ranks_hint(work),
        group.members,
    ]


def test_what_a_dead_rank_had_sent_arrives_and_then_its_loss_is_told(launch: Any) -> None:
    ranks = launch(left_ranks, 2)
    ranks.wait_for("sent")
    ranks.signal(1, signal.SIGKILL)
    ranks.gone(1)
    (ranks.folder / "killed").touch()
    tensor, errors, success, failed, members = ranks.results([0])[0]
    assert tensor == [1.0] * 4
    assert errors == ["rank 1 is gone, or was evicted", "every other rank is gone"]
    assert (success, failed, members) == (False, [1], [0, 1])


def unlike_ranks(rank: int, world: int, folder: Path) -> Any:
    start(rank, world, folder)
    if rank:
        dist.send(torch.ones(4), 0)
        dist.send(torch.ones(5), 0)
        return None
    try:
        dist.recv(torch.zeros(3), 1)
    except pg.CollectiveMismatch as error:
        tensor = torch.zeros(5)
        dist.recv(tensor, 1)
        return [str(error), tensor.tolist()]
    return None


def test_a_message_of_another_size_is_refused_and_the_next_one_comes(launch: Any) -> None:
    ((error, tensor),) = launch(unlike_ranks, 2).results([0])
    assert "sent 16 bytes where 12 are expected" in error
    assert tensor == [1.0] * 5


def dropped_ranks(rank: int, world: int, folder: Path) -> Any:
    start(rank, world, folder)
    if rank == 0:
        for value in range(3):
            dist.isend(torch.full((LARGE,), float(value)), 1)  # nobody keeps the work or the tensor
        torch.full((LARGE,), -1.0)  # would be found in memory that was freed
        dist.barrier()
        dist.barrier()
        return None
    dist.barrier()
    got = [torch.zeros(LARGE) for _ in range(3)]
    for tensor in got:
        dist.recv(tensor, 0)
    dist.barrier()  # until then the sender is there
    return [[tensor.min().item(), tensor.max().item()] for tensor in got]


def test_the_memory_of_a_message_that_nobody_holds_is_kept_until_it_has_left(launch: Any) -> None:
    assert launch(dropped_ranks, 2).results([1]) == [[[value, value] for value in (0.0, 1.0, 2.0)]]
