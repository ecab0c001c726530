"""Rails over real links: two NICs carry one transfer, and it outlives the loss of one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1020)]

INSIDE = Path(__file__).with_name("inside_rails.py")
MIB = 1 << 20
SIZE = 16 * MIB


@pytest.fixture(scope="module")
def report(lab: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    """One boot for all."""
    done = lab(["--numa", "2", "--nics", "4"], [sys.executable, str(INSIDE)])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_two_nics_carry_one_transfer(report: dict[str, Any]) -> None:
    assert report["arrived"]
    senders = [report["whole"]["lab0"], report["whole"]["lab1"]]
    assert sum(senders) > SIZE
    assert min(senders) > SIZE // 8, report


def test_a_transfer_goes_on_when_a_link_is_lost(report: dict[str, Any]) -> None:
    link = report["link"]
    assert link["done_at_loss"] < link["done_at_return"] < link["total"]
    assert link["without"]["lab1"] == 0
    assert link["without"]["lab0"] > SIZE
    assert report["arrived_again"]


def test_a_link_that_comes_back_is_used_again(report: dict[str, Any]) -> None:
    assert report["link"]["returned"] > MIB


def test_rails_of_both_nics_count_what_they_moved(report: dict[str, Any]) -> None:
    for address in ("10.78.0.1", "10.78.0.2"):
        assert sum(nbytes for device, _, nbytes, _ in report["rails"] if device == address) > MIB, report
