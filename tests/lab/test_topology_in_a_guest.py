"""Topology and NUMA memory on a real kernel: two nodes, far memory, four NICs, two drives, huge pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1020)]

INSIDE = Path(__file__).with_name("inside_topology.py")
FLAGS = ["--numa", "2", "--nics", "4", "--nvme", "2", "--far-mem", "512M", "--hugepages", "16"]
FACTS = r"""
cat /sys/devices/system/node/node*/distance
for n in $VMLAB_NICS; do
  d=/sys/class/net/$n/device/..
  echo "$n $(cat $d/numa_node) $(basename $(readlink -f $d))"
done
echo "$(lscpu -p=CPU,NODE | grep -v '#' | tr '\n' ' ')"
"""


@pytest.fixture(scope="module")
def guest(lab: Callable[..., subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    """One boot for all: what the kernel's own files and tools say, and what ours says."""
    script = f"{FACTS}\nexec {sys.executable} {INSIDE}"
    *facts, report = lab(FLAGS, ["bash", "-c", script]).stdout.rstrip("\n").split("\n")
    return {"distances": facts[:3], "nics": facts[3:7], "cpus": facts[7].split(), **json.loads(report)}


def test_distances_are_those_of_sysfs(guest: dict[str, Any]) -> None:
    expected = [[int(word) for word in line.split()] for line in guest["distances"]]
    assert guest["topology"]["numa_distances"] == expected == [[10, 21, 30], [21, 10, 30], [30, 30, 10]]


def test_cpus_are_those_of_lscpu(guest: dict[str, Any]) -> None:
    told = {f"{cpu},{node['index']}" for node in guest["topology"]["nodes"] for cpu in node["cpus"]}
    assert told == set(guest["cpus"])


def test_nics_lie_where_sysfs_says(guest: dict[str, Any]) -> None:
    told = [
        f"{device['name']} {device['numa_node']} {device['pci']}"
        for device in guest["topology"]["devices"]
        if device["kind"] == "nic"
    ]
    assert told == guest["nics"]
    addresses = {device["name"]: device["addresses"] for device in guest["topology"]["devices"]}
    assert addresses["lab2"][0] == "10.78.0.3"


def test_distances_between_nics_and_drives_follow_their_roots(guest: dict[str, Any]) -> None:
    near = guest["topology"]["distances"]
    # The kernel numbers drives as they answer, so either may be the one of node 0.
    devices = guest["topology"]["devices"]
    here, there = sorted(
        (each for each in devices if each["kind"] == "nvme"), key=lambda each: each["numa_node"]
    )
    assert near["lab0"]["lab2"] == near["lab0"][here["name"]] == "same root"
    assert near["lab0"]["lab1"] == near["lab0"][there["name"]] == near["lab0"]["node:1"] == "other node"
    assert near["lab1"]["node:1"] == "same node"


def test_far_memory_comes_with_the_firmwares_figures(guest: dict[str, Any]) -> None:
    near, _, far = guest["topology"]["nodes"]
    assert (far["cpus"], far["read_latency_ns"], far["read_bandwidth_bytes_per_s"]) == ([], 400, 4096 << 20)
    assert near["read_latency_ns"] == 80
    assert far["tier"] > near["tier"]
    assert re.search(r"node 2: no CPUs, .*400 ns, 4\.29 GB/s, tier \d+", guest["text"])


def test_the_drawing_shows_every_node_and_device(guest: dict[str, Any]) -> None:
    words = " ".join(ElementTree.fromstring(guest["svg"]).itertext())
    for node in guest["topology"]["nodes"]:
        assert f"node {node['index']}" in words
    for device in guest["topology"]["devices"]:
        assert device["name"] in words


@pytest.mark.parametrize("node", [0, 1, 2])
def test_every_page_lies_on_the_node_asked_for(guest: dict[str, Any], node: int) -> None:
    bound = guest["bound"][str(node)]
    assert f"bind:{node}" in bound["maps"]
    assert set(re.findall(r"\bN(\d+)=", bound["maps"])) == {str(node)}, bound["maps"]
    assert bound["told"] == bound["seen"] == node


def test_huge_pages_hold_the_region_on_its_node(guest: dict[str, Any]) -> None:
    huge = guest["huge"]
    assert huge["nbytes"] == str(4 << 20)
    assert "huge" in huge["maps"].split()
    assert "N1=2" in huge["maps"]
    assert "kernelpagesize_kB=2048" in huge["maps"]


def test_missing_huge_pages_are_named_with_the_remedy(guest: dict[str, Any]) -> None:
    assert re.search(
        r"needs 512 huge pages of 2 MiB, \d+ are free of 16 .*echo \d+ > /proc/sys/vm/nr_hugepages",
        guest["huge"]["refusal"],
    )


def test_a_drive_is_a_region_on_its_controllers_node(guest: dict[str, Any]) -> None:
    assert guest["drive"] == {"kind": "BLOCK", "nbytes": (256 << 20) - 4096, "node": 1, "content": "block"}


def test_bytes_move_between_far_memory_and_huge_pages(guest: dict[str, Any]) -> None:
    assert guest["transfer"] == (1 << 20) // 4
