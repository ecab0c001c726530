"""Peers in other namespaces, as in containers: what shm cannot reach goes over tcp, and one line says why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.testing import PeerProcess
from mooncake_transfer.testing.namespaces import NetworkPair, NetworkUnavailable
from mooncake_transfer.testing.pattern import digest

NBYTES = 1 << 20
TIMES = 3

# Writes and reads again and again, and says what went over which driver and what the engine logged. Its
# arguments: a descriptor, its bytes, how often, and the engine's settings as JSON.
INITIATOR = """
import json, logging, msgspec, sys
from collections import Counter
from mooncake_transfer import TransferConfig, TransferEngine

logged = []

class Collector(logging.Handler):
    def emit(self, record):
        fields = {name: getattr(record, name, "") for name in ("peer", "rail", "region")}
        logged.append([record.getMessage(), fields])

logging.getLogger("mooncake_transfer").addHandler(Collector(logging.WARNING))
descriptor, nbytes, times = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
moved = Counter()
with TransferEngine(msgspec.json.decode(sys.argv[4], type=TransferConfig)) as engine:
    local = engine.allocate(nbytes)
    remote = engine.import_region(descriptor)
    for number in range(1, times + 1):
        local.view()[:] = bytes([number]) * nbytes
        transfer = engine.write(local, remote, [[0, 0, nbytes]])
        transfer.wait(20)
        moved.update(transfer.bytes_by_driver)
        local.view()[:] = bytes(nbytes)
        transfer = engine.read(local, remote, [[0, 0, nbytes]])
        transfer.wait(20)
        moved.update(transfer.bytes_by_driver)
        assert bytes(local.view()) == bytes([number]) * nbytes
print(json.dumps([moved, logged]))
"""


def unshared(*kinds: str) -> list[str]:
    """A command that runs another in namespaces of its own. Skips where the machine forbids them."""
    command = ["unshare", *kinds]
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("the program `unshare` is not installed")
    if tried.returncode != 0:
        pytest.skip(f"this machine does not allow `{' '.join(command)}`: {tried.stderr.strip()}")
    return command


Logged = list[tuple[str, dict[str, str]]]  # message and fields of each record


def moved_and_logged(before: list[str], descriptor: bytes, **settings: Any) -> tuple[dict[str, int], Logged]:
    """Run the initiator after ``before``; return bytes by driver, and the warnings of its engine."""
    config = msgspec.json.encode(TransferConfig(**{"drivers": ("shm", "tcp"), **settings})).decode()
    command = [*before, sys.executable, "-c", INITIATOR, descriptor.hex(), str(NBYTES), str(TIMES), config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    moved, logged = json.loads(done.stdout)
    return moved, logged


def test_foreign_memory_beyond_a_pid_namespace_goes_over_tcp_with_the_reason_told_once() -> None:
    before = unshared("--pid", "--fork", "--kill-child")
    memory = bytearray(NBYTES)
    with TransferEngine(TransferConfig(drivers=("shm", "tcp"))) as owner, owner.register(memory) as region:
        moved, logged = moved_and_logged(before, region.descriptor())
        assert memory == bytes([TIMES]) * NBYTES
    assert moved == {"tcp": 2 * TIMES * NBYTES}
    ((reason, _),) = logged
    assert "shm" in reason
    assert "not visible from this pid namespace" in reason


def test_allocated_memory_is_shared_beyond_a_pid_namespace() -> None:
    before = unshared("--pid", "--fork", "--kill-child")
    with TransferEngine(TransferConfig(drivers=("shm", "tcp"))) as owner, owner.allocate(NBYTES) as region:
        moved, logged = moved_and_logged(before, region.descriptor())
        assert bytes(region.view()) == bytes([TIMES]) * NBYTES
    assert moved == {"shm": 2 * TIMES * NBYTES}
    assert logged == []


@pytest.fixture
def network() -> Iterator[NetworkPair]:
    try:
        network = NetworkPair()
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with network:
        yield network


def test_allocated_memory_of_another_container_goes_over_tcp_with_the_reason_told_once(
    network: NetworkPair,
) -> None:
    """Two processes with namespaces of their own (network, ipc, pid, mount, uts), as containers have them."""
    apart = unshared("--ipc", "--pid", "--mount", "--uts", "--fork", "--kill-child")
    containers = [[*network.inside(end), *apart] for end in (0, 1)]
    config = TransferConfig(drivers=("shm", "tcp"), host=network.addresses[0])
    with PeerProcess(config, prefix=containers[0]) as owner:
        region = owner.allocate(NBYTES, 0)
        moved, logged = moved_and_logged(containers[1], region.descriptor, host=network.addresses[1])
        assert owner.digest(region.number) == digest(np.full(NBYTES, TIMES, dtype=np.uint8))
        assert moved == {"tcp": 2 * TIMES * NBYTES}
        ((reason, fields),) = logged
        assert "in another network namespace of this host" in reason
        assert fields["peer"] == owner.address
        assert fields["rail"] == "shm"
        assert fields["region"].startswith("owned-")  # as the peer's process names what it owns


# Where the engine that asks listens; but for the first, it asks over the only interface that can lead there.
@pytest.mark.parametrize("asker", ["at its link-local address", "on loopback", "on loopback, data too"])
def test_engines_of_two_hosts_reach_each_other_by_link_local_addresses_of_a_chosen_interface(
    network: NetworkPair, asker: str
) -> None:
    """Each by its own interface, whose name the other one does not have."""
    hosts = network.use_link_local()
    settings: list[dict[str, Any]] = [
        {"drivers": ("tcp",), "host": host, "driver_options": {"tcp": {"interfaces": host.partition("%")[2]}}}
        for host in hosts
    ]
    if "on loopback" in asker:
        settings[1]["host"] = "127.0.0.1"
    if "data too" in asker:
        settings[1]["driver_options"] = {}
    settings[0]["metrics_port"] = 0
    with PeerProcess(TransferConfig(**settings[0]), prefix=network.inside(0)) as owner:
        assert owner.address.startswith("[fe80::1]:")
        region = owner.allocate(NBYTES, 0)
        moved, logged = moved_and_logged(network.inside(1), region.descriptor, **settings[1])
        assert owner.digest(region.number) == digest(np.full(NBYTES, TIMES, dtype=np.uint8))
    assert moved == {"tcp": 2 * TIMES * NBYTES}
    assert logged == []


def test_a_registry_listens_at_a_link_local_address_and_another_host_asks_it(network: NetworkPair) -> None:
    here, there = network.use_link_local()
    program = Path(sys.executable).with_name("mooncake")
    serve = [program, "metadata", "serve", "--host", here, "--port", "0", "--ready-fd", "1"]
    with subprocess.Popen([*network.inside(0), *serve], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            assert url.startswith(f"http://[{here}]:")
            seen = url.replace(here, here.partition("%")[0] + "%" + there.partition("%")[2])
            ask = [*network.inside(1), program, "metadata", "list", seen, "--timeout-s", "60"]
            done = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
        finally:
            server.kill()
