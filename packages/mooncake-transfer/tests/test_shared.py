"""Memory that processes of one host share under a name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError, NameUnknown, RegionClosed, RegionRefused, TransferError
from mooncake_transfer.shared import SharedSegment

NBYTES = 1 << 16
DEADLINE_S = 20.0
WRITE_AND_HOLD = """
import sys
from mooncake_transfer.shared import SharedSegment
segment = SharedSegment.open(sys.argv[1], timeout_s=20)
assert bytes(segment.view()[:5]) == b"hello", bytes(segment.view()[:5])
segment.part(1, 2)[:5] = b"there"
print("written", flush=True)
sys.stdin.read()
"""
OFFER_AND_HOLD = """
import sys
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.shared import SharedSegment
engine = TransferEngine(TransferConfig(drivers=("shm",)))
segment = SharedSegment.offer(engine.allocate(65536), sys.argv[1])
segment.view()[:5] = b"hello"
print("offered", flush=True)
sys.stdin.read()
"""


def child(code: str, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(drivers=("shm",))) as engine:
        yield engine


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4()}"


def test_what_one_process_writes_the_other_sees(engine: TransferEngine, name: str) -> None:
    with SharedSegment.offer(engine.allocate(NBYTES), name) as segment:
        segment.view()[:5] = b"hello"
        with child(WRITE_AND_HOLD, name) as other:
            assert said(other) == "written"
            assert bytes(segment.part(1, 2)[:5]) == b"there"
            other.kill()
        assert len(segment.part(2, 3)) == NBYTES // 3


def test_who_opened_it_can_register_it_and_lend_it_to_peers(engine: TransferEngine, name: str) -> None:
    with (
        TransferEngine(TransferConfig(drivers=("shm",))) as other,
        SharedSegment.offer(engine.allocate(NBYTES), name) as offered,
        SharedSegment.open(name, engine=other) as opened,
    ):
        assert opened.region is not None
        local = engine.allocate(NBYTES)
        np.frombuffer(local.view(), dtype=np.uint8)[:] = 7
        engine.write(local, engine.import_region(opened.region.descriptor()), [[0, 0, NBYTES]]).wait(
            DEADLINE_S
        )
        assert np.unique(np.frombuffer(offered.view(), dtype=np.uint8)).tolist() == [7]


def test_a_killed_owner_leaves_no_name_and_its_memory_to_who_has_it(name: str) -> None:
    with child(OFFER_AND_HOLD, name) as owner:
        assert said(owner) == "offered"
        opened = SharedSegment.open(name, timeout_s=DEADLINE_S)
        owner.send_signal(signal.SIGKILL)
    assert bytes(opened.view()[:5]) == b"hello"
    with pytest.raises(NameUnknown, match=name):
        SharedSegment.open(name, timeout_s=0.1)
    opened.close()
    with pytest.raises(RegionClosed, match=name):
        opened.view()


def test_a_closed_one_is_no_longer_offered_and_its_name_is_free(engine: TransferEngine, name: str) -> None:
    segment = SharedSegment.offer(engine.allocate(NBYTES), name)
    with pytest.raises(ConfigError, match=f"{name}.* cannot be offered"):
        SharedSegment.offer(engine.allocate(NBYTES), name)
    segment.close()
    segment.close()
    with pytest.raises(NameUnknown):
        SharedSegment.open(name, timeout_s=0.1)
    SharedSegment.offer(engine.allocate(NBYTES), name).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_does_not_get_it(engine: TransferEngine, name: str) -> None:
    nobody = 65534
    as_nobody = f"""
import os, sys
from mooncake_transfer import shared
place = shared._place(sys.argv[1])
os.setuid({nobody})
shared._place = lambda name: place
shared._is_ours = lambda connection: True
try:
    shared.SharedSegment.open(sys.argv[1], timeout_s=20)
except Exception as error:
    print(type(error).__name__)
"""
    with SharedSegment.offer(engine.allocate(NBYTES), name), child(as_nobody, name) as other:
        assert said(other) == RegionRefused.__name__


def test_arguments_that_cannot_work_are_refused_by_name(engine: TransferEngine, name: str) -> None:
    with pytest.raises(ConfigError, match="region is 5"):
        SharedSegment.offer(5, name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be mapped by others"):
        SharedSegment.offer(engine.register(bytearray(NBYTES)), name)
    for wrong in (5, "", "x" * 65):
        with pytest.raises(ConfigError, match="name is"):
            SharedSegment.open(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="engine is 5"):
        SharedSegment.open(name, engine=5)  # type: ignore[arg-type]
    segment = SharedSegment.offer(engine.allocate(NBYTES), name)
    with segment, pytest.raises(TransferError, match="rank is 2"):
        segment.part(2, 2)
