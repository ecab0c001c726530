"""The nvmeof driver and the kernel's NVMe target: over tcp, rdma and loop, and from user space."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1020)]

INSIDE = Path(__file__).with_name("inside_nvmeof.py")


@pytest.fixture(scope="module")
def reports(lab: Callable[..., subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    """One boot for all."""
    done = lab(["--rdma", "--nvmet", "--nvme", "1"], [sys.executable, str(INSIDE)])
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["tcp", "rdma", "loop"])
def test_a_block_device_of_the_kernels_initiator_holds_what_was_written(
    reports: list[dict[str, Any]], kind: str
) -> None:
    (report,) = [each for each in reports if each.get("block_device") == kind]
    assert report["aligned"]
    assert report["unaligned"]


@pytest.mark.parametrize("kind", ["tcp", "rdma", "loop"])
def test_nvme_cli_discovers_and_connects_and_every_namespace_is_there(
    reports: list[dict[str, Any]], kind: str
) -> None:
    (report,) = [each for each in reports if each.get("block_device") == kind]
    assert report["discovered"]
    assert report["namespaces"] == [1, 2]
    assert report["again"]


@pytest.mark.parametrize("nsid", [1, 2])
def test_the_kernels_initiator_reads_what_ours_wrote(reports: list[dict[str, Any]], nsid: int) -> None:
    (report,) = [each for each in reports if each.get("userspace") == nsid]
    assert report["ours"]
    assert report["theirs"]
    assert report["small"]
    assert report["uuid"]
    assert report["nbytes"] == 256 << 20
    assert bool(report["digests"]) == (nsid == 2)


def test_bytes_of_a_pci_drive_are_right_with_passthrough_on(reports: list[dict[str, Any]]) -> None:
    (report,) = [each for each in reports if each.get("passthrough")]
    assert report["same"]
    assert report["back"]
    assert report["edge"]


def test_passthrough_goes_by_commands_to_the_character_device(
    reports: list[dict[str, Any]],
) -> None:
    (report,) = [each for each in reports if each.get("passthrough")]
    assert report["opened"]
    # The driver's second ring takes nothing but NVMe commands, and sends what they may not do to threads.
    assert (report["common"], report["commands"]) == (0, 32)


def test_a_target_that_was_taken_away_under_load_is_used_again(reports: list[dict[str, Any]]) -> None:
    (report,) = [each for each in reports if each.get("taken_away")]
    assert "nvme-tcp" in report["error"]
    assert report["refused"]
    assert report["ours"]
    assert report["theirs"]


@pytest.mark.parametrize("kind", ["rdma", "loop"])
def test_what_the_kernels_initiator_loses_under_load_is_told_and_can_be_used_again(
    reports: list[dict[str, Any]], kind: str
) -> None:
    (report,) = [each for each in reports if each.get("taken_from_the_kernel") == kind]
    assert report["left"] > 0, "the transfer was over before the target was gone"
    assert report["again"]
    if kind == "rdma":  # the kernel waits, and goes on
        assert report["error"] == ""
        assert report["whole"]
    else:  # its device goes with the port
        assert "cannot write" in report["error"]
