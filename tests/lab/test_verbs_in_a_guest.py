"""The verbs driver over soft-RoCE: with pyverbs as a peer, over four NICs, and between two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INSIDE = Path(__file__).with_name("inside_verbs.py")
INSIDE_HOSTS = Path(__file__).with_name("inside_verbs_hosts.py")
MIB = 1 << 20
SIZE = 4 * MIB
OK, REMOTE_ACCESS_ERROR = 0, 10  # as verbs numbers them


@pytest.fixture(scope="module")
def report(lab: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    """One boot for all but the last."""
    done = lab(["--nics", "4", "--rdma"], [sys.executable, str(INSIDE)])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_probe_finds_every_device(report: dict[str, Any]) -> None:
    named = {line.partition(":")[0] for line in report["devices"]}
    assert {"rxe0", "rxe1", "rxe_lab0", "rxe_lab1", "rxe_lab2", "rxe_lab3"} <= named, report["reason"]


def test_pyverbs_reads_and_writes_our_regions(report: dict[str, Any]) -> None:
    assert report["pyverbs"]["read"] == [OK, True]
    assert report["pyverbs"]["write"] == [OK, True]


def test_the_device_refuses_a_wrong_rkey_and_a_key_without_the_right(report: dict[str, Any]) -> None:
    assert report["pyverbs"]["wrong_rkey"] == REMOTE_ACCESS_ERROR
    assert report["pyverbs"]["read_only"] == [1, REMOTE_ACCESS_ERROR]
    assert report["pyverbs"]["untouched"]


def test_two_nics_send_one_transfer_and_two_receive_it(report: dict[str, Any]) -> None:
    senders = [report["nics"]["whole"][nic] for nic in ("lab0", "lab1")]
    assert sum(senders) > SIZE
    assert min(senders) > SIZE // 8, report["nics"]
    assert report["nics"]["back"]


def test_a_transfer_survives_loss_and_the_end_of_a_link(report: dict[str, Any]) -> None:
    assert sum(report["nics"]["lossy"].values()) > SIZE
    assert report["nics"]["without_lab1"]["lab1"] == 0
    assert report["nics"]["without_lab1"]["lab0"] > SIZE


def test_tcp_carries_on_when_every_nic_is_gone(report: dict[str, Any]) -> None:
    assert report["nics"]["without_any"]["lab0"] == report["nics"]["without_any"]["lab1"] == 0
    by_tcp = sum(nbytes for driver, _, nbytes, _ in report["nics"]["rails"] if driver == "tcp")
    assert by_tcp >= SIZE


def test_the_suite_of_all_drivers_passes_over_soft_roce(report: dict[str, Any]) -> None:
    assert report["suite"]


def test_bytes_go_between_two_hosts(lab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = lab(["--hosts", "2", "--rdma"], [sys.executable, str(INSIDE_HOSTS)])
    said = [line for line in done.stdout.splitlines() if "arrived" in line]
    assert len(said) == 1, done.stdout
    assert "arrived over verbs: True" in said[0]
