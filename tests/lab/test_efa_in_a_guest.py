"""The efa driver over libfabric's verbs;ofi_rxm, which the kernel's soft-RoCE carries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1020)]

INSIDE = Path(__file__).with_name("inside_efa.py")
INSIDE_SUITE = Path(__file__).with_name("inside_efa_suite.py")
SIZE = 4 << 20
# ofi_rxm makes a completion queue with room for so many peers; soft-RoCE has none for the usual 256.
FEW_PEERS = "FI_UNIVERSE_SIZE=8"
MTU = 4096  # the largest that a packet of RoCE has


@pytest.fixture(scope="module")
def report(lab: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    """One boot for all."""
    done = lab(["--rdma", "--env", FEW_PEERS], [sys.executable, str(INSIDE)])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_libfabric_lists_the_device(report: dict[str, Any]) -> None:
    assert report["listed"]


def test_bytes_go_there_and_back_by_rdma(report: dict[str, Any]) -> None:
    assert report["read"]
    assert report["written"]
    assert report["packets"] > 2 * SIZE // MTU


def test_a_notification_comes_behind_the_bytes(report: dict[str, Any]) -> None:
    assert report["told"]


def test_a_wrong_key_is_refused(report: dict[str, Any]) -> None:
    assert "key" in report["refused"]


def test_a_part_of_the_suite_of_all_drivers_passes(
    run_suite: Callable[[list[str], Path], None],
) -> None:
    run_suite(["--rdma", "--env", FEW_PEERS], INSIDE_SUITE)
