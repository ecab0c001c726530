"""What the master orders to be copied, and books, step by step on a virtual clock."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_store import protocol
from mooncake_store._core import Ledger
from mooncake_store.config import StoreConfig
from mooncake_store.keys import object_digests
from mooncake_store.master.copies import JOB_TTL_S, MEND_PAUSE_S, Copies
from mooncake_store.master.state import MasterState
from mooncake_store.parts import SEGMENT
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import CopyOutcome, Outcome

GRANULE = 4096
TTL_S = 7.0
CONFIG = StoreConfig(reservation_ttl_s=TTL_S, evict_reserve_fraction=0.0)


class Master:
    """A state with a clock, and owners whose client, connection and segment have one number."""

    def __init__(self, *owners: int, config: StoreConfig = CONFIG, epoch: int = 5, minor: int = 2) -> None:
        self.minor = minor
        self.state = MasterState(epoch, config)
        self.now_s = 100.0
        (self.copies,) = (group for group in self.state.context.groups if isinstance(group, Copies))
        for owner in owners:
            self.mount(owner)

    def mount(self, owner: int, granules: int = 8, **more: Any) -> None:
        request = protocol.Mount(
            client=owner,
            nbytes=granules * GRANULE,
            descriptor=b"d",
            segment=owner,
            minors=(0, self.minor),
            **more,
        )
        self.state.handle(request, owner, f"host:{owner}", self.now_s)

    def ask(self, client: int, request: protocol.FromMember) -> Any:
        request.epoch, request.client = self.state.epoch, client
        return self.state.handle(request, client, "", self.now_s)

    def adopt(self, owner: int, ledger: Ledger, *, draining: bool = False) -> None:
        self.mount(owner, keeps=True, last_version=ledger.last_version, draining=draining)
        ledger.restart(True)
        self.ask(owner, protocol.Adopt(frames=ledger.part(0), last=True))

    def put(self, owner: int, *keys: bytes, nbytes: int = GRANULE) -> None:
        reservation = self.reserve(owner, *keys, nbytes=nbytes)
        commit = protocol.Commit(reservation=reservation, failed=[], if_exists="keep", notices_seen=0)
        assert list(self.ask(owner, commit).outcomes) == [Outcome.STORED] * len(keys)

    def reserve(self, owner: int, *keys: bytes, nbytes: int = GRANULE) -> int:
        reserve = protocol.Reserve(
            digests=object_digests("", keys),
            keys=list(keys),
            sizes=np.full(len(keys), nbytes, dtype="<u8").tobytes(),
            if_exists="keep",
            avoid=[],
            policy=PutPolicy(preferred_segments=(owner,)),
        )
        reserved = self.ask(owner, reserve)
        assert isinstance(reserved, protocol.Reserved)
        return reserved.reservation

    def order(self, client: int, *keys: bytes, **what: int) -> protocol.CopiesAsked:
        asked = self.ask(client, protocol.AskCopies(digests=object_digests("", keys), **what))
        assert isinstance(asked, protocol.CopiesAsked)
        return asked

    def look(self, client: int, asked: protocol.CopiesAsked) -> list[CopyOutcome]:
        return [
            CopyOutcome(one) for one in self.ask(client, protocol.LookAfterCopies(job=asked.job)).outcomes
        ]

    def take(self, owner: int) -> protocol.CopiesToMake:
        todo = self.ask(owner, protocol.TakeCopies(most_bytes=1 << 30))
        assert isinstance(todo, protocol.CopiesToMake)
        return todo

    def make(self, owner: int, *keys: bytes, failed: tuple[int, ...] = ()) -> list[CopyOutcome]:
        todo = self.take(owner)
        end = protocol.EndCopies(copy=todo.copy, failed=list(failed), keys=list(keys))
        return [CopyOutcome(one) for one in self.ask(owner, end).outcomes]

    def where(self, key: bytes) -> set[int]:
        (found,) = self.ask(1, protocol.FindReplicas(digests=object_digests("", [key]))).segments
        return set(found)

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        for owner in list(self.state.context.members.all):
            self.ask(owner.client, protocol.Heartbeat(leases=[], notices_seen=0))
        self.state.on_tick(self.now_s)


@pytest.mark.parametrize("target", [-1, 77, 2**64, 2**70])
def test_a_target_that_is_no_segment_is_said_at_once_and_no_mover_hears_of_it(target: int) -> None:
    master = Master(1, 2)
    master.put(1, b"a", b"b")
    good = master.order(2, b"a", target=2)
    bad = master.order(2, b"b", target=target)
    assert list(bad.outcomes) == [CopyOutcome.NOWHERE]
    assert master.make(1, b"a") == [CopyOutcome.STORED]
    assert master.look(2, good) == [CopyOutcome.STORED]


def test_what_has_begun_ends_at_its_deadline_when_the_answer_was_never_given() -> None:
    master = Master(1, 2)
    master.put(1, b"a", b"b")
    asked = master.order(2, b"a", b"b", target=2)
    real = master.copies._map

    class Failing:
        begun = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def copy_begin(self, *wish: Any) -> Any:
            self.begun += 1
            if self.begun == 2:
                raise ValueError("a mistake")
            return real.copy_begin(*wish)

    master.copies._map = Failing()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="a mistake"):
        master.take(1)
    master.copies._map = real
    assert master.state.stats().reserved_bytes == GRANULE
    master.later(TTL_S + 0.1)
    stats = master.state.stats()
    assert (stats.reserved_bytes, stats.leased_bytes) == (0, 0)
    assert master.look(2, asked)[0] == CopyOutcome.FAILED


def test_what_moves_leaves_its_source_though_it_came_to_the_target_meanwhile() -> None:
    master = Master(1, 2)
    master.put(1, b"a")
    master.order(2, b"a", target=2)
    todo = master.take(1)
    moved = master.order(2, b"a", target=2, source=1)
    master.ask(1, protocol.EndCopies(copy=todo.copy, failed=[], keys=[b"a"]))
    assert master.take(1).copy == 0
    assert master.look(2, moved) == [CopyOutcome.THERE]
    assert master.where(b"a") == {2}


def test_nothing_moves_to_a_replica_that_is_to_leave_its_segment() -> None:
    master = Master(1, 2)
    master.put(1, b"a")
    master.order(2, b"a", target=2)
    assert master.make(1, b"a") == [CopyOutcome.STORED]
    master.ask(2, protocol.Drain(on=True))
    moved = master.order(2, b"a", target=2, source=1)
    assert list(moved.outcomes) == [CopyOutcome.NOWHERE]
    assert 1 in master.where(b"a")


def test_no_segment_is_empty_while_what_lies_in_it_waits_for_the_ledger_of_another_owner() -> None:
    config = msgspec.structs.replace(CONFIG, recovery=True)
    before, ledgers = Master(1, 2, config=config), {1: Ledger(), 2: Ledger()}
    before.put(1, b"a", nbytes=12 * GRANULE)
    for owner, ledger in ledgers.items():
        alive = before.ask(owner, protocol.Heartbeat(leases=[], notices_seen=0))
        for first, frames in alive.notices:
            ledger.take(first, frames)
    master = Master(3, 4, config=config, epoch=6)
    master.adopt(1, ledgers[1], draining=True)

    def drained() -> protocol.Drained:
        master.now_s += 1.0
        master.make(1, b"a")
        shown = master.ask(1, protocol.Drain(on=True))
        assert isinstance(shown, protocol.Drained)
        return shown

    assert not any(drained().done for _ in range(3))
    master.adopt(2, ledgers[2])
    assert not drained().done
    for owner in (3, 4):
        master.ask(owner, protocol.Heartbeat(leases=[], notices_seen=1 << 60))
    master.later(config.client_ttl_s)
    assert drained().done
    assert master.where(b"a") == {3, 4}


def test_room_of_a_late_writer_holds_up_no_drain_and_room_of_one_in_time_does() -> None:
    master = Master(1, 2, minor=3)
    master.put(1, b"a")
    master.reserve(1, b"late")
    master.later(TTL_S / 2)
    in_time = master.reserve(1, b"in time")

    def drained() -> protocol.Drained:
        master.now_s += 0.1
        master.make(1, b"a")
        shown = master.ask(1, protocol.Drain(on=True))
        assert isinstance(shown, protocol.Drained)
        return shown

    assert not any(drained().done for _ in range(3))
    master.later(TTL_S / 2)
    assert len(master.state.context.fences) == 1
    assert not any(drained().done for _ in range(3))
    commit = protocol.Commit(reservation=in_time, failed=[0], if_exists="keep", notices_seen=0)
    assert list(master.ask(1, commit).outcomes) == [Outcome.FAILED]
    master.later(TTL_S)
    assert len(master.state.context.fences) == 2
    assert any(drained().done for _ in range(3))
    assert master.where(b"a") == {2}


def test_a_request_for_replicas_that_is_over_leaves_the_answers_of_others() -> None:
    master = Master(1, 2)
    master.put(1, b"a")
    first = master.order(1, b"a", replicas=3)
    master.later(JOB_TTL_S / 2)
    second = master.order(2, b"a", replicas=3)
    master.make(1, b"a")
    master.make(1)
    master.later(1.0)
    wanted = master.look(2, second)
    assert wanted == [CopyOutcome.NOWHERE]
    master.later(JOB_TTL_S / 2)
    assert master.look(1, first) == []
    assert master.look(2, second) == wanted


def test_a_segment_that_could_not_be_written_to_is_tried_after_others_for_a_while() -> None:
    master, keys = Master(1, 3), (b"a", b"b", b"c")
    master.mount(2, granules=64)
    master.put(1, *keys)
    master.ask(1, protocol.Drain(on=True))
    todo = master.take(1)
    rows = np.frombuffer(todo.target.rows, dtype="<u8").reshape(-1, 5)
    assert rows[:, SEGMENT].tolist() == [2, 2, 2], "there is most room"
    master.ask(1, protocol.EndCopies(copy=todo.copy, failed=[0, 1, 2], keys=list(keys)))
    master.now_s += 1.0
    assert master.make(1, *keys) == [CopyOutcome.STORED] * 3
    assert [master.where(key) for key in keys] == [{3}] * 3
    master.ask(1, protocol.Drain(on=False))
    master.later(CONFIG.client_ttl_s)
    master.put(1, b"d")
    master.order(1, b"d", replicas=2)
    assert master.make(1, b"d") == [CopyOutcome.STORED]
    assert master.where(b"d") == {1, 2}, "it is tried again"


def test_a_segment_that_could_not_be_written_to_is_tried_again_when_there_is_no_other() -> None:
    master = Master(1, 2)
    master.put(1, b"a")
    master.order(1, b"a", replicas=2)
    assert master.make(1, b"a", failed=(0,)) == [CopyOutcome.FAILED]
    master.later(MEND_PAUSE_S)
    assert master.make(1, b"a") == [CopyOutcome.STORED]
