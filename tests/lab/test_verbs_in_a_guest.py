"""The verbs driver over soft-RoCE: with pyverbs as a peer, over eight NICs, and between two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1020)]

INSIDE = Path(__file__).with_name("inside_verbs.py")
INSIDE_SUITE = Path(__file__).with_name("inside_verbs_suite.py")
INSIDE_HOSTS = Path(__file__).with_name("inside_verbs_hosts.py")
MIB = 1 << 20
SIZE = 8 * MIB
OK, REMOTE_ACCESS_ERROR = 0, 10  # as verbs numbers them


@pytest.fixture(scope="module")
def report(lab: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    """One boot for all but the last two."""
    done = lab(["--nics", "8", "--rdma"], [sys.executable, str(INSIDE)])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_probe_finds_every_device_and_pyverbs_opens_it(report: dict[str, Any]) -> None:
    named = {line.partition(":")[0] for line in report["devices"]}
    assert named == {"rxe0", "rxe1", *(f"rxe_lab{number}" for number in range(8))}, report["reason"]
    assert report["opened"].count(", MTU ") == len(named), report["opened"]


def test_the_doctor_names_every_device_and_what_else_can_be_used(report: dict[str, Any]) -> None:
    doctor = report["doctor"]
    assert (doctor["exit"], doctor["broken"]) == (0, [])
    assert doctor["drivers"]["verbs"] == report["devices"]
    assert doctor["drivers"]["tcp"] == ["sockets"]


def test_pyverbs_reads_and_writes_our_regions(report: dict[str, Any]) -> None:
    assert report["pyverbs"]["read"] == [OK, True]
    assert report["pyverbs"]["write"] == [OK, True]


def test_the_device_refuses_a_wrong_rkey_and_a_key_without_the_right(report: dict[str, Any]) -> None:
    assert report["pyverbs"]["wrong_rkey"] == REMOTE_ACCESS_ERROR
    assert report["pyverbs"]["read_only"] == [1, REMOTE_ACCESS_ERROR]
    assert report["pyverbs"]["untouched"]


def test_four_nics_send_one_transfer_and_four_send_it_back(report: dict[str, Any]) -> None:
    for moved, senders in (("whole", range(4)), ("back", range(4, 8))):
        counts = [report["nics"][moved][f"lab{number}"] for number in senders]
        assert sum(counts) > SIZE
        assert min(counts) > SIZE / 4 / 2, f"less than half of an even share: {report['nics']}"


def test_notices_are_writes_with_immediate_data(report: dict[str, Any]) -> None:
    """Of the driver, behind its writes; of pyverbs, by both ways that an endpoint takes."""
    assert report["nics"]["notices"] == 1
    assert report["nics"]["pyverbs_notices"] == [OK, OK]


def test_a_transfer_survives_loss_and_the_end_of_a_link(report: dict[str, Any]) -> None:
    """And when the link is back, it is used again."""
    assert sum(report["nics"]["lossy"].values()) > SIZE
    assert report["nics"]["dropped"] > 0
    lost = report["nics"]["lost_one"]
    assert lost["left"] > 0, "the transfer was over before the link was"
    assert lost["errors"]["lab1"] > 0
    assert report["nics"]["without_lab1"]["lab1"] == 0
    assert sum(report["nics"]["without_lab1"].values()) > SIZE


def test_tcp_carries_on_when_every_nic_is_gone(report: dict[str, Any]) -> None:
    lost = report["nics"]["lost_all"]
    assert lost["left"] > 0, "the transfer was over before the links were"
    assert sum(lost["errors"].values()) > 0
    assert all(report["nics"]["without_any"][f"lab{number}"] == 0 for number in range(4))
    by_tcp = sum(nbytes for driver, _, nbytes, _ in report["nics"]["rails"] if driver == "tcp")
    assert by_tcp >= SIZE


def test_a_part_of_the_suite_of_all_drivers_passes(
    run_suite: Callable[[list[str], Path], None],
) -> None:
    run_suite(["--rdma"], INSIDE_SUITE)


def test_bytes_go_between_two_hosts(lab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = lab(["--hosts", "2", "--rdma"], [sys.executable, str(INSIDE_HOSTS)])
    said = [line for line in done.stdout.splitlines() if "arrived" in line]
    assert len(said) == 1, done.stdout
    assert "arrived over verbs: True" in said[0]
