"""One rank that serves: its share of the sequences, and its slots' experts for the sequences of all.

Every step ends with one exchange over the process group, after which all ranks know the same: the new tokens,
who is still there, who waits to be let in, and who has the weights that a repair brings.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import EXPERTS, LAYERS, WEIGHTS, Model, Part, run_expert
from sequences import Book, prompt

from mooncake_ep import Buffer, ExpertOwners, RouteTable, eplb, pg
from mooncake_ep.repair import Offer, Repair, SlotWeights, start_repair
from mooncake_transfer import TransferEngine

__all__ = ["MOST_RANKS", "Server"]

MOST_RANKS, SLOTS, EACH = 8, 6, 2  # slots for experts of a rank; sequences that a rank generates at once
MAX_TOKENS, MOST_SEQUENCES = 512, 16
TIMEOUT_S = 10.0
PAIRS = 2 * MOST_SEQUENCES  # of a row: number and token of each sequence, both one higher; 0 is none
WAITING, READY, STOP, WIDTH = PAIRS, PAIRS + 1, PAIRS + 2, PAIRS + 3


class Server:
    """A rank from its start to the end of serving. `comes_later`: it joins ranks that serve already."""

    def __init__(self, rank: int, world: int, folder: Path, seed: int, comes_later: bool) -> None:
        self.rank, self.folder = rank, folder
        self.model = Model(seed)
        options = pg.MooncakeBackendOptions(
            torch.ones(MOST_RANKS, dtype=torch.int32), is_extension=comes_later, max_group_size=MOST_RANKS
        )
        dist.init_process_group(
            "mooncake", init_method=f"file://{folder}/store", rank=rank, world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S), pg_options=options,
        )  # fmt: skip
        self.group: Any = dist.group.WORLD
        self.book, self.parts = Book(), dict[int, Part]()
        self.load = torch.zeros(LAYERS, EXPERTS)
        self.slots_of_rank = [SLOTS] * world
        self.placement = torch.full((LAYERS, SLOTS * world), -1)
        self.plan: eplb.Plan | None = None
        self.repair: Repair | None = None
        self.repairs = 0
        self.held = [torch.zeros(SLOTS, WEIGHTS).bfloat16() for _ in range(LAYERS)]
        self.engine = TransferEngine()
        self.weights = SlotWeights(self.engine, rank, self.held)
        self.offers: dict[int, Offer] = {}
        if comes_later:
            pg.join_group(self.group, timeout=60.0)
        else:
            self.placement = eplb.rebalance(
                torch.ones(LAYERS, EXPERTS), self.slots_of_rank, min_replicas=2
            ).physical_to_logical
            for layer, row in enumerate(self.placement[:, _slots_of(rank)].tolist()):
                for slot, expert in enumerate(row):
                    self.held[layer][slot] = self.model.expert(layer, expert)
        self.buffer = Buffer(self.group)
        self._meet()
        self.book.hand_out(self.group.members, EACH, begin_new=True)
        if comes_later:
            self._tell("joined", ranks=[rank])  # where it is the first of all, nobody else does

    def serve(self) -> None:
        """Generate until the file `stop` is there and what was begun is complete."""
        while True:
            began = time.monotonic()
            numbers = self.book.of(self.rank)
            for number in numbers:
                if number not in self.parts:  # new, or taken over: its tokens so far are read again
                    self.parts[number] = Part(prompt(number) + self.book.made[number])
            tokens = self.model.step([self.parts[number] for number in numbers], self._experts)
            for number, token in zip(numbers, tokens, strict=True):
                self.parts[number].tokens = [token]
            rows = self._exchange(dict(zip(numbers, tokens, strict=True)))
            stopping = any(bool(row[STOP]) for row in rows)
            self._take(rows, stopping)
            if stopping and not self.book.rank_of:
                break
            self._tell("step", began=began)
        dist.destroy_process_group()
        self.weights.close()
        self.engine.close()

    # The experts of a layer

    def _experts(
        self, layer: int, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Bring tokens to the experts of a layer and back. When a rank dies meanwhile, ask others instead."""
        self.load[layer] += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        while True:
            slots = self.tables[layer].route(chosen)
            active = self.alive.clone()
            received, counts, handle, _, _ = self.buffer.low_latency_dispatch(
                x, slots, MAX_TOKENS, sum(self.slots_of_rank), use_fp8=False,
                active_ranks=active, timeout_us=int(TIMEOUT_S * 1e6),
            )  # fmt: skip
            results = self.buffer.get_next_low_latency_combine_buffer(handle)
            assert isinstance(received, torch.Tensor)
            for slot, count in enumerate(counts.tolist()):
                results[slot, :count] = run_expert(self.held[layer][slot], received[slot, :count])
            combined, _, _ = self.buffer.low_latency_combine(
                results, slots, weights, handle, zero_copy=True, active_ranks=active
            )
            lost = ((self.alive == 1) & (active == 0)).nonzero().flatten().tolist()
            if not lost:
                return combined
            # Every survivor found the same ranks missing in this call, so all of them repeat it.
            self._without(lost, f"in layer {layer}")

    def _without(self, ranks: list[int], where: str) -> None:
        self.alive[ranks] = 0
        self._route()
        lost = sum(len(table.lost_experts) for table in self.tables)
        self._tell("lost", ranks=ranks, where=where, experts_lost=lost)

    def _route(self) -> None:
        active = tuple(bool(one) for one in self.alive)
        self.tables = [RouteTable(row, tuple(self.slots_of_rank), EXPERTS, active) for row in self.placement]

    # What all ranks decide alike, after each step

    def _exchange(self, tokens: dict[int, int]) -> list[torch.Tensor]:
        """Rows of all members; a rank that died has none, and is out of the group."""
        row = torch.zeros(WIDTH, dtype=torch.int64)
        for place, (number, token) in enumerate(tokens.items()):
            row[2 * place], row[2 * place + 1] = number + 1, token + 1
        missing = [rank for rank in range(MOST_RANKS) if rank not in self.group.members]
        waits = pg.get_peer_state(self.group, missing)
        row[WAITING] = sum(1 << rank for rank, waiting in zip(missing, waits, strict=True) if waiting)
        row[READY] = self.repairs if self.repair is not None and self._ready(self.repair) else 0
        row[STOP] = (self.folder / "stop").exists()
        rows = [torch.zeros_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return [rows[rank] for rank in self.group.members]

    def _ready(self, repair: Repair) -> bool:
        if repair.done():
            repair.wait()  # raises what went wrong
        return repair.done()

    def _take(self, rows: list[torch.Tensor], stopping: bool) -> None:
        tokens = {
            int(row[place]) - 1: int(row[place + 1]) - 1
            for row in rows
            for place in range(0, PAIRS, 2)
            if row[place]
        }
        for number, made in self.book.add(tokens):
            self.parts.pop(number, None)
            self._tell("finished", number=number, tokens=made)
        members = self.group.members
        gone = [rank for rank, alive in enumerate(self.alive.tolist()) if alive and rank not in members]
        if gone:
            self._without(gone, "between two layers")
        waiting = ~0
        for row in rows:
            waiting &= int(row[WAITING])
        if self.repair is not None and all(int(row[READY]) == self.repairs for row in rows):
            self._commit()
        newcomers = [rank for rank in range(MOST_RANKS) if waiting >> rank & 1]
        if newcomers and not stopping:
            pg.recover_ranks(self.group, newcomers)
            self.buffer.update_ep_member()
            self._meet()
            self._tell("joined", ranks=newcomers)
        elif int(self.alive.sum()) < self.expected:
            self._plan()
        taken = self.book.hand_out(self.group.members, EACH, begin_new=not stopping)
        for number in taken:
            self._tell("taken over", number=number, rank=self.book.rank_of[number])

    def _meet(self) -> None:
        """Learn from each member what it has; a new one learns from the others what goes on."""
        state = (self.book, self.placement, self.repairs) if int(self.placement.max()) >= 0 else None
        known = None
        newcomers = []
        for rank in self.group.members:
            told: list[Any] = [(state, self.weights.offer())]
            try:
                dist.broadcast_object_list(told, src=rank)
            except pg.RankFailed:  # on all ranks; the next exchange shows who is gone
                continue
            theirs, self.offers[rank] = told[0]
            known = known or theirs
            if theirs is None:
                newcomers.append(rank)
        self.book, before, self.repairs = known
        self.slots_of_rank = [SLOTS] * dist.get_world_size()
        self.placement = torch.full((LAYERS, sum(self.slots_of_rank)), -1)
        self.placement[:, : before.shape[1]] = before
        for rank in newcomers:
            self.placement[:, _slots_of(rank)] = -1
        slots = [rank for rank, count in enumerate(self.slots_of_rank) for _ in range(count)]
        self.buffer.set_owners(ExpertOwners(tuple(slots), len(self.slots_of_rank)))
        self._plan()

    def _plan(self) -> None:
        """Begin to bring experts to where they should be now; what was under way for another plan ends."""
        members = self.group.members
        self.expected = len(members)
        self.alive = torch.tensor(
            [int(rank in members) for rank in range(len(self.slots_of_rank))], dtype=torch.int32
        )
        for rank in range(len(self.slots_of_rank)):
            if rank not in members:
                self.placement[:, _slots_of(rank)] = -1
                self.offers.pop(rank, None)
        self._route()
        if self.repair is not None:
            self.repair.discard()
        load = self.load + 1
        dist.all_reduce(load)
        self.plan = eplb.rebalance(
            load, self.slots_of_rank, current=self.placement, active_ranks=self.alive.bool(), min_replicas=2
        )
        self.repairs += 1
        self.repair = start_repair(
            self.weights, self.plan, self.placement, self.slots_of_rank, self.offers,
            bytes_per_s=200e6, deadline_s=30.0,
        )  # fmt: skip

    def _commit(self) -> None:
        """Every rank has what the plan gives it: serve by the new placement from now on."""
        assert self.repair is not None
        assert self.plan is not None
        self.repair.commit(self.rank * SLOTS)
        self.placement, moves = self.plan.physical_to_logical, len(self.plan.moves)
        self._route()
        least = min(int(table.replicas.min()) for table in self.tables)
        self.repair = None
        self._tell("repaired", copies=moves, owners=least)

    def _tell(self, event: str, **what: Any) -> None:
        if self.rank != int(self.alive.argmax()):
            return  # the first rank that lives speaks for all
        told = {"event": event, "s": time.monotonic(), **what}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def _slots_of(rank: int) -> slice:
    return slice(rank * SLOTS, (rank + 1) * SLOTS)


def main() -> None:
    """Be the rank that the command line says."""
    rank, world, seed, comes_later, folder = sys.argv[1:]
    torch.set_num_threads(1)
    Server(int(rank), int(world), Path(folder), int(seed), comes_later == "later").serve()


if __name__ == "__main__":
    main()
