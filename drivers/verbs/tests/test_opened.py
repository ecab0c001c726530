"""What the probe makes of pyverbs, where there is one: over a small double of its interface.

The lab's test asks the real one: tests/lab/test_verbs_in_a_guest.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_driver_verbs import opened, plugin
from mooncake_driver_verbs.devices import Port
from mooncake_driver_verbs.opened import Opened
from mooncake_transfer.hooks import Available, Unavailable

ERRORS = "class PyverbsError(Exception): ...\n"
DEVICE = """
from types import SimpleNamespace as Made
from pyverbs.pyverbs_error import PyverbsError

OPENED = []

def get_device_list():
    if not {devices}:
        raise PyverbsError("Failed to get devices list")
    return [Made(name=name) for name in {devices}]

class Context:
    def __init__(self, name):
        if name == "mlx5_1":
            raise PyverbsError("Failed to open device mlx5_1")
        OPENED.append(self)
    def __enter__(self):
        return self
    def __exit__(self, *_):
        OPENED.remove(self)
    def query_device(self):
        return Made(fw_version="28.39.1002", phys_port_cnt=2)
    def query_port(self, port):
        return Made(active_mtu=2 + port)
"""
Install = Callable[[list[bytes]], None]
PORTS = [
    Port("mlx5_0", 2, "ACTIVE", "Ethernet", "400 Gb/sec", ("eth0",), 0),
    Port("mlx5_1", 1, "ACTIVE", "Ethernet", "400 Gb/sec", ("eth1",), 0),
]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a pyverbs on the path that lists these devices, and takes it away again."""

    def made(devices: list[bytes]) -> None:
        folder = tmp_path / "pyverbs"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "pyverbs_error.py").write_text(ERRORS)
        (folder / "device.py").write_text(DEVICE.replace("{devices}", repr(devices)))
        monkeypatch.syspath_prepend(tmp_path)

    before = {name: module for name, module in sys.modules.items() if name.startswith("pyverbs")}
    for name in before:
        del sys.modules[name]
    yield made
    for name in [name for name in sys.modules if name.startswith("pyverbs")]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two active ports, by sysfs."""
    monkeypatch.setattr(plugin, "reason_for_none", lambda: None)
    monkeypatch.setattr(plugin, "ports", lambda: PORTS)
    monkeypatch.setattr(plugin, "LIBRARY", "libc.so.6")
    monkeypatch.setattr(plugin, "_may_lock_anything", lambda: True)


def test_devices_are_opened_and_closed(install: Install) -> None:
    install([b"mlx5_0", b"mlx5_1"])
    assert opened.open_devices() == {
        "mlx5_0": Opened("28.39.1002", {1: 1024, 2: 2048}),
        "mlx5_1": "Failed to open device mlx5_1",
    }
    assert sys.modules["pyverbs.device"].OPENED == []


@pytest.mark.usefixtures("active")
def test_the_probe_names_what_can_be_opened_and_says_more_of_it(install: Install) -> None:
    install([b"mlx5_0", b"mlx5_1"])
    said = "mlx5_0:2 Ethernet 400 Gb/sec on eth0, MTU 2048, firmware 28.39.1002"
    assert plugin.probe({}) == Available((said,))


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize(
    ("listed", "reason"),
    [([], "mlx5_0: libibverbs does not list it"), ([b"mlx5_1"], "Failed to open device")],
)
def test_what_sysfs_shows_and_the_library_does_not_open_cannot_be_used(
    install: Install, listed: list[bytes], reason: str
) -> None:
    install(listed)
    found = plugin.probe({})
    assert isinstance(found, Unavailable)
    assert reason in found.reason
    assert "ibverbs-providers" in found.reason


@pytest.mark.usefixtures("active")
def test_a_pyverbs_that_cannot_be_imported_leaves_what_sysfs_says(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install([])
    (tmp_path / "pyverbs" / "device.py").write_text("raise ImportError('undefined symbol: ibv_x')")
    assert plugin.probe({}) == Available(tuple(map(str, PORTS)))
    assert "undefined symbol: ibv_x" in caplog.text


def test_foreign_code_makes_the_probe_run_apart(install: Install) -> None:
    install([])
    (info,) = plugin.mooncake_transfer_drivers()
    assert not info.trusted_probe


def test_without_pyverbs_the_probe_only_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "is_installed", lambda: False)
    (info,) = plugin.mooncake_transfer_drivers()
    assert info.trusted_probe
