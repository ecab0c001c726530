"""What the engine is told of the driver, and which options it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_driver_cxl import CxlOptions, plugin
from mooncake_driver_cxl.options import render
from mooncake_driver_cxl.pool import Pool
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError, DriverUnavailable, RegionRefused
from mooncake_transfer.hooks import Available, Unavailable

KEYS_OF_ONE_PROCESS = 1024


def test_the_driver_is_found_and_says_where_pools_may_lie() -> None:
    (info,) = plugin.mooncake_transfer_drivers()
    assert (info.name, info.kinds, info.priority) == ("cxl", frozenset({"dram"}), 105)
    assert isinstance(info.probe(), Available)


def test_devices_of_the_machine_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dax1.0").mkdir()
    (tmp_path / "dax0.0").mkdir()
    monkeypatch.setattr(plugin, "DAX_DEVICES", tmp_path)
    assert plugin.probe() == Available(("/dev/dax0.0", "/dev/dax1.0"))


def test_describing_the_driver_does_not_load_its_core() -> None:
    code = (
        "import sys; from mooncake_driver_cxl import plugin; plugin.mooncake_transfer_drivers()[0].probe();"
        "assert 'mooncake_driver_cxl._core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_system_that_does_not_tell_its_boot_id_cannot_use_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plugin, "BOOT_ID", tmp_path / "boot_id")
    found = plugin.probe()
    assert isinstance(found, Unavailable)
    assert "mount /proc" in found.reason


def test_without_a_pool_the_driver_is_left_out_quietly_unless_it_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(DriverUnavailable, match=r"has no pool: set driver_options\['cxl'\]\['path'\]"):
        TransferEngine(TransferConfig(drivers=("cxl",)))
    assert plugin.endpoints({}) == Unavailable(
        "it has no pool: set driver_options['cxl']['path'] to a DAX device or a file"
    )
    assert not caplog.records


def test_every_option_is_rendered_and_taken_by_the_core(pool_path: Path) -> None:
    given = {"path": str(pool_path), "create": True, "size_bytes": 64 << 20, "lease_s": 0.5}
    options = render({**given, "workers": 3})
    assert set(options) == set(CxlOptions.__struct_fields__)
    assert (options["workers"], options["create"], options["lease_s"]) == ("3", "true", "0.5")
    config = TransferConfig(drivers=("cxl",), driver_options={"cxl": given})
    with TransferEngine(config) as engine:
        assert engine.drivers["cxl"].usable


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": 16}, "host is 16; it must be within 0..15"),
        ({"workers": "many"}, "Expected `int`"),
        ({"color": "red"}, "known options: path, create"),
        ({"coherent": "maybe"}, "coherent"),
        ({"lease_s": 0}, "lease_s is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(options)


def test_pages_and_node_of_the_pool_are_not_chosen_by_the_caller(pool_path: Path) -> None:
    options = {"path": str(pool_path), "create": True, "size_bytes": 64 << 20}
    config = TransferConfig(drivers=("cxl",), driver_options={"cxl": options}, allocate_from="cxl")
    with TransferEngine(config) as engine:
        with pytest.raises(ConfigError, match="decides on pages and node"):
            engine.allocate(1 << 20, huge_pages=True)
        with pytest.raises(ConfigError, match="driver 'tcp' has no memory of its own"):
            engine.allocate(1 << 20, driver="tcp")
        name = "ab" + "漢" * 30
        with engine.allocate(1 << 20, name=name) as region:
            assert region.name == name
            assert [block.name for block in Pool.open(**options).blocks()] == ["ab" + "漢" * 20]


def test_places_of_keys_that_were_revoked_are_given_again_and_not_with_them(pool_path: Path) -> None:
    options = {"path": str(pool_path), "create": True, "size_bytes": 64 << 20}
    config = TransferConfig(drivers=("cxl",), driver_options={"cxl": options}, allocate_from="cxl")
    with TransferEngine(config) as owner, TransferEngine(config) as user:
        region, local = owner.allocate(4096), user.allocate(4096)
        first = region.grant()
        remote = user.import_region(first)
        user.read(local, remote, [[0, 0, 4096]]).wait(20.0)
        region.revoke(first, 20.0)
        for _ in range(2 * KEYS_OF_ONE_PROCESS):
            region.revoke(region.grant(), 20.0)
        in_force = region.grant()
        user.read(local, user.import_region(in_force), [[0, 0, 4096]]).wait(20.0)
        for one in (remote, user.import_region(first)):
            with pytest.raises(RegionRefused):
                user.read(local, one, [[0, 0, 4096]]).wait(20.0)
        user.read(local, user.import_region(region.descriptor()), [[0, 0, 4096]]).wait(20.0)
