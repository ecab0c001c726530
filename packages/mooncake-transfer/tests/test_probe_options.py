"""A probe that asks for the user's options gets them, here and in a process of its own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mooncake_transfer import TransferConfig, TransferEngine, drivers, plugins
from mooncake_transfer._opening import examine_drivers
from mooncake_transfer.errors import DriverUnavailable

PLUGIN = """
import os
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl

def told(options):
    if options.get("library") == "/nowhere":
        return Unavailable("/nowhere is not there")
    return Available(tuple(f"{name}={value!r}" for name, value in sorted(options.items())))

def plain():
    return Available((str(os.getpid()),))

def driver(name, probe, trusted):
    dram = frozenset({"dram"})
    return DriverInfo(name, dram, 9, probe=probe, load=lambda: None, options=dict, trusted_probe=trusted)

@hookimpl
def mooncake_transfer_drivers():
    return [driver("told", told, False), driver("told_here", told, True), driver("plain", plain, False)]
"""
OURS = ("told", "told_here", "plain")


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "zoo_options.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = EntryPoint("zoo_options", "zoo_options", plugins.DRIVER_GROUP)
    real = importlib.metadata.entry_points

    def entry_points(group: str) -> list[EntryPoint]:
        return [found, *real(group=group)] if group == plugins.DRIVER_GROUP else list(real(group=group))

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    monkeypatch.setattr(drivers, "_verdicts", drivers._Verdicts())
    plugins.driver_plugins.cache_clear()
    yield
    plugins.driver_plugins.cache_clear()


def devices(options: drivers.Options) -> dict[str, tuple[str, ...]]:
    """What the probes of the plugin name."""
    return {info.name: status.devices for info, status in drivers.select_drivers(OURS, options)}


def test_a_probe_gets_the_options_and_one_that_takes_none_is_not_asked_again_for_others() -> None:
    given = {"library": "/opt/a.so", "depth": 3, "on": True}
    first = devices(dict.fromkeys(OURS, given))
    assert first["told"] == first["told_here"] == ("depth=3", "library='/opt/a.so'", "on=True")
    second = devices({"told": {"library": "/opt/b.so"}, "plain": {"depth": 4}})
    assert second["told"] == ("library='/opt/b.so'",), "the answer to other options does not hold"
    assert second["told_here"] == ()
    assert second["plain"] == first["plain"], "its answer holds whatever the options are"


def test_answers_that_are_too_old_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers._verdicts, "AGE_S", -1.0)
    for number in range(2):
        devices({"told": {"library": f"/opt/{number}.so"}})
        assert len(drivers._verdicts._known) == 2  # of told and plain


def test_engine_and_doctor_tell_the_probe_what_the_configuration_says() -> None:
    options = {"told": {"library": "/opt/a.so"}, "told_here": {"library": "/nowhere"}}
    found = {status.name: status for status in examine_drivers(TransferConfig(driver_options=options))}
    assert found["told"].devices == ("library='/opt/a.so'",)
    assert found["told_here"].reason == "/nowhere is not there"
    for name in ("told", "told_here"):
        config = TransferConfig(drivers=(name,), driver_options={name: {"library": "/nowhere"}})
        with pytest.raises(DriverUnavailable, match="/nowhere is not there"):
            TransferEngine(config)
