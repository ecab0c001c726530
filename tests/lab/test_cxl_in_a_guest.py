"""CXL memory on a real kernel: volatile and persistent type-3 devices as DAX devices, and as a NUMA node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INSIDE = Path(__file__).with_name("inside_cxl.py")
MOVED = {
    "read": True,
    "written": True,
    "write with a reading key": "RegionRefused",
    "read of a closed region": "RegionRefused",
}
Lab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def devices(lab: Lab) -> dict[str, Any]:
    """One boot for both kinds of device."""
    done = lab(["--cxl", "both", "--cxl-mode", "devdax"], [sys.executable, str(INSIDE)])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_processes_share_a_volatile_device(devices: dict[str, Any]) -> None:
    found = devices["VMLAB_CXL_DAX"]
    assert found["path"] in devices["devices"]
    assert found["moved"] == MOVED


@pytest.mark.parametrize("kind", ["VMLAB_CXL_DAX", "VMLAB_CXL_PMEM_DAX"], ids=["volatile", "persistent"])
def test_memory_is_kept_in_a_device_while_nobody_has_it_mapped(devices: dict[str, Any], kind: str) -> None:
    assert devices[kind]["nbytes"] is True
    assert devices[kind]["kept"] is True


def test_a_pool_lies_on_the_node_that_cxl_memory_became(lab: Lab) -> None:
    done = lab(["--cxl", "ram", "--cxl-mode", "system-ram"], [sys.executable, str(INSIDE)])
    node = json.loads(done.stdout)["node"]
    assert re.search(r"bind:(\d+)", node["maps"])
    pages = set(re.findall(r"\bN(\d+)=", node["maps"]))
    assert pages == set(re.findall(r"bind:(\d+)", node["maps"])), node["maps"]
    assert node["moved"] == MOVED
