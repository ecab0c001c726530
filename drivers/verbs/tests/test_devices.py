"""What sysfs says of devices, and the reason when none can be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_driver_verbs import plugin
from mooncake_driver_verbs.devices import Port, ports, reason_for_none
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import DriverUnavailable
from mooncake_transfer.hooks import Available, Unavailable


class Machine:
    """A tree as the kernel shows it."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.dev, self.modules = root / "infiniband", root / "dev", root / "module"
        self.dev.mkdir()
        self.modules.mkdir()

    def add(self, device: str, state: str = "4: ACTIVE", numa: str = "0", interface: str = "eth0") -> None:
        port = self.sysfs / device / "ports" / "1"
        (port / "gid_attrs" / "ndevs").mkdir(parents=True)
        (self.sysfs / device / "device").mkdir()
        (self.sysfs / device / "device" / "numa_node").write_text(f"{numa}\n")
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text("Ethernet\n")
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
        for index in range(2):
            (port / "gid_attrs" / "ndevs" / str(index)).write_text(f"{interface}\n")

    def reason(self) -> str | None:
        return reason_for_none(self.sysfs, self.dev, self.modules)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_ports_are_read_with_their_interface_and_numa_node(machine: Machine) -> None:
    machine.add("mlx5_1", numa="1", interface="eth1")
    machine.add("mlx5_0", state="1: DOWN")
    found = ports(machine.sysfs)
    assert found == [
        Port("mlx5_0", 1, "DOWN", "Ethernet", "100 Gb/sec (4X EDR)", ("eth0",), 0),
        Port("mlx5_1", 1, "ACTIVE", "Ethernet", "100 Gb/sec (4X EDR)", ("eth1",), 1),
    ]
    assert [port.active for port in found] == [False, True]
    assert str(found[1]) == "mlx5_1:1 Ethernet 100 Gb/sec (4X EDR) on eth1"


def test_each_thing_that_is_missing_has_a_reason_of_its_own(machine: Machine) -> None:
    assert "ib_core" in str(machine.reason())
    (machine.modules / "ib_core").mkdir()
    assert "no RDMA device" in str(machine.reason())
    machine.add("mlx5_0", state="1: DOWN")
    assert "mlx5_0:1 is DOWN" in str(machine.reason())
    machine.add("mlx5_1")
    assert "uverbs" in str(machine.reason())
    (machine.dev / "uverbs0").touch()
    assert machine.reason() is None


def test_the_probe_names_what_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "reason_for_none", lambda: "no port is active")
    assert plugin.probe({}) == Unavailable("no port is active")
    monkeypatch.setattr(plugin, "reason_for_none", lambda: None)
    monkeypatch.setattr(plugin, "LIBRARY", "libibverbs.so.77")
    found = plugin.probe({})
    assert isinstance(found, Unavailable)
    assert "libibverbs.so.77" in found.reason
    assert "install" in found.reason


def test_the_probe_names_the_limit_on_locked_memory(monkeypatch: pytest.MonkeyPatch, double: Path) -> None:
    monkeypatch.setattr(plugin, "open_devices", lambda: None)
    monkeypatch.setattr(plugin, "reason_for_none", lambda: None)
    monkeypatch.setattr(plugin, "LIBRARY", "libc.so.6")
    monkeypatch.setattr(plugin.resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(plugin, "_may_lock_anything", lambda: True)
    assert isinstance(plugin.probe({}), Available)
    monkeypatch.setattr(plugin, "_may_lock_anything", lambda: False)
    found = plugin.probe({})
    assert isinstance(found, Unavailable)
    assert "65536 bytes" in found.reason
    assert "ulimit -l" in found.reason


def test_a_library_that_is_named_needs_neither_sysfs_nor_the_systems(
    monkeypatch: pytest.MonkeyPatch, double: Path
) -> None:
    monkeypatch.setattr(plugin, "LIBRARY", "libibverbs.so.77")
    monkeypatch.setattr(plugin, "_may_lock_anything", lambda: True)
    options = {"verbs": {"library": str(double), "devices": "double0"}}
    with TransferEngine(TransferConfig(drivers=("verbs",), driver_options=options)) as engine:
        assert engine.drivers["verbs"].usable
    options = {"verbs": {"library": "/nowhere/libibverbs.so.1"}}
    with pytest.raises(DriverUnavailable, match=r"/nowhere/libibverbs\.so\.1, which option library names"):
        TransferEngine(TransferConfig(drivers=("verbs",), driver_options=options))


def test_the_driver_describes_itself() -> None:
    (info,) = plugin.mooncake_transfer_drivers()
    assert (info.name, info.kinds, info.network) == ("verbs", {"dram", "cuda"}, True)
    assert 10 < info.priority < 100
