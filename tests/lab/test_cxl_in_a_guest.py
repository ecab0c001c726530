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

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1020)]

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
    """One boot for both kinds of device, and for huge pages."""
    flags = ["--cxl", "both", "--cxl-mode", "devdax", "--hugepages", "40"]
    done = lab(flags, [sys.executable, str(INSIDE)])
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


def test_a_store_lends_memory_of_a_device_and_other_processes_reach_it_there(devices: dict[str, Any]) -> None:
    found = devices["VMLAB_CXL_DAX"]["store"]
    assert found["ours"] is True
    assert found["theirs"] is True
    assert found["lent"] == found["capacity"] == 8 << 20
    assert found["used"] == 2 << 20
    assert found["moved"] == {"cxl": 2 << 20}
    assert found["back"] is True


def test_the_doctor_names_the_devices_and_misses_the_network(devices: dict[str, Any]) -> None:
    for kind in ("VMLAB_CXL_DAX", "VMLAB_CXL_PMEM_DAX"):
        report = devices[kind]["doctor"]
        assert (report["exit"], report["broken"]) == (0, [])
        assert devices[kind]["path"] in report["drivers"]["cxl"]
        assert "no RDMA" in report["drivers"]["verbs"]


def test_processes_share_huge_pages(devices: dict[str, Any]) -> None:
    found = devices["huge"]
    assert {"huge", "kernelpagesize_kB=2048"} <= set(found["maps"].split())
    assert found["taken"] == 32
    assert found["moved"] == MOVED
    assert found["kept"] is True


def test_a_pool_on_huge_pages_that_cannot_be_says_why(devices: dict[str, Any]) -> None:
    found = devices["huge"]
    assert found["free"] == 40
    assert re.match(r"ConfigError: .*67112960, is no multiple of its page, 2097152", found["unaligned"])
    assert re.match(
        r"MemoryUnavailable: .*41 huge pages of which 40 are free; write more to .*nr_hugepages",
        found["too many"],
    )


def test_a_pool_lies_on_the_node_that_cxl_memory_became(lab: Lab) -> None:
    done = lab(["--cxl", "ram", "--cxl-mode", "system-ram"], [sys.executable, str(INSIDE)])
    node = json.loads(done.stdout)["node"]
    assert re.search(r"bind:(\d+)", node["maps"])
    pages = set(re.findall(r"\bN(\d+)=", node["maps"]))
    assert pages == set(re.findall(r"bind:(\d+)", node["maps"])), node["maps"]
    assert node["moved"] == MOVED
