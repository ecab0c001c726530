"""A peer that hangs while its checksums are awaited: every wait ends in time, and nobody else waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import pytest

from mooncake_transfer import Region, RemoteRegion, Transfer, TransferConfig, TransferEngine
from mooncake_transfer.errors import (
    CallTimeout,
    PeerUnreachable,
    RegionBusy,
    RegionRefused,
    TransferCancelled,
    TransferTimeout,
)
from mooncake_transfer.peer import CHECKSUM_METHOD
from mooncake_transfer.testing import PeerProcess
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

CONFIG = TransferConfig(drivers=("shm",))
NBYTES = 1 << 20
DEADLINE_S = 20.0
PROMPT_S = 12.0
"""More than any wait of these tests is given, and less than an answer of the peer may take (30 s)."""
AWAITED = r"write to region 'owned-1' of .*checksums of the peer are awaited, moved over shm"


@contextmanager
def prompt() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < PROMPT_S


class Near:
    """An engine, and peers in processes of their own that hang when a test says so."""

    def __init__(self, stack: ExitStack, config: TransferConfig = CONFIG) -> None:
        self.stack = stack
        self.engine = stack.enter_context(TransferEngine(config))
        self.local: Region = self.engine.allocate(NBYTES)

    def peer(self) -> tuple[PeerProcess, RemoteRegion]:
        process = self.stack.enter_context(PeerProcess(CONFIG))
        self.stack.callback(process.resume)
        return process, self.engine.import_region(process.allocate(NBYTES, 1).descriptor)

    def write(self, remote: RemoteRegion, deadline_s: float | None = None) -> Transfer:
        rows = [[0, 0, NBYTES]]
        return self.engine.write(self.local, remote, rows, verify=True, deadline_s=deadline_s)


@pytest.fixture
def near() -> Iterator[Near]:
    with ExitStack() as stack:
        yield Near(stack)


@pytest.fixture
def hung(near: Near) -> RemoteRegion:
    process, remote = near.peer()
    near.write(remote).wait(DEADLINE_S)
    process.pause()
    return remote


def moved(transfer: Transfer) -> Transfer:
    wait_until(lambda: transfer.bytes_done == NBYTES, "every byte has moved")
    return transfer


def ends_at_its_deadline(near: Near, remote: RemoteRegion) -> None:
    with pytest.raises(
        TransferTimeout, match="did not finish by its deadline.*" + AWAITED.rpartition(".*")[2]
    ):
        near.write(remote, deadline_s=0.3).wait(DEADLINE_S)


def ends_with_the_wait(near: Near, remote: RemoteRegion) -> None:
    with pytest.raises(TransferTimeout, match=AWAITED):
        near.write(remote).wait(0.3)


def ends_when_it_is_cancelled(near: Near, remote: RemoteRegion) -> None:
    transfer = moved(near.write(remote))
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        transfer.wait(DEADLINE_S)


def ends_with_the_task_that_awaits_it(near: Near, remote: RemoteRegion) -> None:
    async def impatient() -> None:
        await asyncio.wait_for(near.write(remote), 0.3)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(impatient())


def ends_an_await_at_its_deadline(near: Near, remote: RemoteRegion) -> None:
    async def patient() -> None:
        await near.write(remote, deadline_s=0.3)

    with pytest.raises(TransferTimeout):
        asyncio.run(patient())


WAYS = [
    ends_at_its_deadline,
    ends_with_the_wait,
    ends_when_it_is_cancelled,
    ends_with_the_task_that_awaits_it,
    ends_an_await_at_its_deadline,
]


@pytest.mark.parametrize("end", WAYS)
def test_a_stopped_peer_holds_up_no_wait_and_the_memory_is_the_callers_again(
    near: Near, hung: RemoteRegion, end: Callable[[Near, RemoteRegion], None]
) -> None:
    with prompt():
        end(near, hung)
    with prompt():
        near.local.close(PROMPT_S)


def test_a_stopped_peer_delays_no_other(near: Near, hung: RemoteRegion) -> None:
    healthy = near.peer()[1]
    stuck = [moved(near.write(hung)) for _ in range(5)]
    with prompt():
        near.write(healthy).wait(DEADLINE_S)
    assert {transfer.state for transfer in stuck} == {"running"}


def test_a_peer_that_goes_on_answers_who_still_waits_and_who_comes_anew(near: Near) -> None:
    process, remote = near.peer()
    near.write(remote).wait(DEADLINE_S)
    process.pause()
    given_up = [moved(near.write(remote)) for _ in range(5)]
    patient = near.write(remote)
    for transfer in given_up:
        transfer.cancel()
    wait_until(given_up[0].done, "the run before is over")
    again = given_up[0].post(verify=True)  # what still waits for the run before is no concern of this one
    process.resume()
    for transfer in (patient, again):
        transfer.wait(DEADLINE_S)


def test_the_engine_closes_while_a_stopped_peer_is_asked(near: Near, hung: RemoteRegion) -> None:
    transfer = moved(near.write(hung))
    with prompt():
        near.engine.close()
    assert transfer.state == "failed"


def test_a_peer_that_dies_while_it_is_asked_is_unreachable(near: Near) -> None:
    with PeerProcess(CONFIG) as process:
        remote = near.engine.import_region(process.allocate(NBYTES, 1).descriptor)
        near.write(remote).wait(DEADLINE_S)
        process.pause()
        transfer = moved(near.write(remote))
        process.kill()
        with pytest.raises(PeerUnreachable, match=r"could not be compared.*mooncake\.checksums"):
            transfer.wait(DEADLINE_S)


def test_a_peer_that_does_not_answer_in_time_is_told_as_such() -> None:
    with ExitStack() as stack:
        near = Near(stack, msgspec.structs.replace(CONFIG, call_timeout_s=0.5))
        process, remote = near.peer()
        near.write(remote).wait(DEADLINE_S)
        process.pause()
        with pytest.raises(CallTimeout, match=r"could not be compared.*at most 0\.5 s"):
            near.write(remote).wait(DEADLINE_S)


def test_a_region_that_is_closed_before_it_is_compared_is_refused() -> None:
    with ExitStack() as stack:
        fabric = stack.enter_context(FakeFabric())
        near = stack.enter_context(TransferEngine(fabric.config("near")))
        far = stack.enter_context(TransferEngine(fabric.config("far")))
        owned = far.allocate(NBYTES)
        answer = far._dispatcher._handlers[CHECKSUM_METHOD]

        def close_and_answer(body: bytes, caller: object) -> bytes | None:
            owned.close(DEADLINE_S)
            return answer(body, caller)  # type: ignore[arg-type]

        far._dispatcher._handlers[CHECKSUM_METHOD] = close_and_answer
        remote = near.import_region(owned.descriptor())
        with pytest.raises(RegionRefused, match=r"could not be compared.*may be read with this key"):
            near.write(near.allocate(NBYTES), remote, [[0, 0, NBYTES]], verify=True).wait(DEADLINE_S)


def test_no_thread_is_left_when_all_is_compared(near: Near) -> None:
    remote = near.peer()[1]
    near.write(remote).wait(DEADLINE_S)

    def idle() -> bool:
        return not any(one.name.startswith("mooncake-integrity") for one in threading.enumerate())

    wait_until(idle, "the threads end")


def test_the_memory_is_not_the_callers_while_a_range_is_moved_again() -> None:
    with ExitStack() as stack:
        fabric = stack.enter_context(FakeFabric())
        near = stack.enter_context(TransferEngine(fabric.config("near")))
        far = stack.enter_context(TransferEngine(fabric.config("far")))
        local, owned = near.allocate(NBYTES), far.allocate(NBYTES)
        bytes_of(owned)[:] = np.arange(NBYTES, dtype=np.uint64).astype(np.uint8)
        device = fabric.device("far")
        answer = far._dispatcher._handlers[CHECKSUM_METHOD]

        def hold_and_answer(body: bytes, caller: object) -> bytes | None:
            device.hold()
            return answer(body, caller)  # type: ignore[arg-type]

        far._dispatcher._handlers[CHECKSUM_METHOD] = hold_and_answer
        stack.callback(device.release)
        fabric.device("near").corrupt(next=1)
        remote = near.import_region(owned.descriptor())
        transfer = near.read(local, remote, [[0, 0, NBYTES]], verify=True)
        wait_until(lambda: device.held() > 0, "the range is moved again")
        transfer.cancel()
        with pytest.raises(RegionBusy):
            local.close(0.1)
        device.release()
        with pytest.raises(TransferCancelled):
            transfer.wait(DEADLINE_S)
        local.close(DEADLINE_S)
