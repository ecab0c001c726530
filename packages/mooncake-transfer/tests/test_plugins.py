"""Discovery of drivers: a broken plugin never takes the others with it."""

import importlib.metadata
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mooncake_transfer import TransferConfig, TransferEngine, drivers, plugins
from mooncake_transfer.errors import DriverUnavailable

GOOD = """
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl

DRAM = frozenset({"dram"})

@hookimpl
def mooncake_transfer_drivers():
    return [
        DriverInfo("sound", DRAM, 5, probe=lambda: Available(("dev0",)), load=lambda: None),
        DriverInfo("absent", DRAM, 6, probe=lambda: Unavailable("no card; buy one"), load=lambda: None),
        DriverInfo("rude", DRAM, 7, probe=lambda: 1 / 0, load=lambda: None),
    ]
"""
FAILS_TO_IMPORT = "import a_vendor_library_that_is_not_there"
EXITS = "raise SystemExit(3)"
HOOK_RAISES = """
from mooncake_transfer.hooks import hookimpl

@hookimpl
def mooncake_transfer_drivers():
    raise OSError("the hook is broken")
"""
RETURNS_NONSENSE = HOOK_RAISES.replace('raise OSError("the hook is broken")', 'return ["not a driver"]')


@pytest.fixture
def plugin_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = {
        "zoo_good": GOOD,
        "zoo_import": FAILS_TO_IMPORT,
        "zoo_exit": EXITS,
        "zoo_hook": HOOK_RAISES,
        "zoo_nonsense": RETURNS_NONSENSE,
    }
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [EntryPoint(name, name, plugins.DRIVER_GROUP) for name in (*modules, "zoo_missing")]
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: found if group == plugins.DRIVER_GROUP else real(group=group)
    )
    plugins.driver_plugins.cache_clear()
    yield
    plugins.driver_plugins.cache_clear()


@pytest.mark.usefixtures("plugin_zoo")
def test_broken_plugins_are_reported_and_the_sound_one_is_found() -> None:
    found = plugins.driver_plugins()
    assert [info.name for info in found.drivers()] == ["rude", "absent", "sound"]
    reasons = {broken.name: broken.reason for broken in found.broken}
    assert set(reasons) == {"zoo_import", "zoo_exit", "zoo_hook", "zoo_nonsense", "zoo_missing"}
    assert "a_vendor_library_that_is_not_there" in reasons["zoo_import"]
    assert "the hook is broken" in reasons["zoo_hook"]


@pytest.mark.usefixtures("plugin_zoo")
def test_a_probe_says_why_a_driver_cannot_be_used() -> None:
    statuses = {status.name: status for status in drivers.probe_drivers()}
    assert statuses["sound"].usable
    assert statuses["sound"].devices == ("dev0",)
    assert statuses["absent"].reason == "no card; buy one"
    assert "ZeroDivisionError" in statuses["rude"].reason


@pytest.mark.usefixtures("plugin_zoo")
def test_asking_for_a_driver_that_cannot_be_used_names_the_reason() -> None:
    with pytest.raises(DriverUnavailable, match="no card; buy one"):
        TransferEngine(TransferConfig(drivers=("absent",)))
    with pytest.raises(DriverUnavailable, match="pip install mooncake-driver-nowhere"):
        TransferEngine(TransferConfig(drivers=("nowhere",)))


@pytest.mark.usefixtures("plugin_zoo")
def test_a_driver_without_a_proper_capsule_is_refused() -> None:
    with pytest.raises(DriverUnavailable, match="does not start"):
        TransferEngine(TransferConfig(drivers=("sound",)))
