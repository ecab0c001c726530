"""``mooncake doctor``: every driver and limit with its reason, also where nothing is installed."""

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_transfer import plugins
from mooncake_transfer.cli import build_app
from mooncake_transfer.limits import machine_limits

SOUND = """
from mooncake_transfer.hooks import Available, DriverInfo, hookimpl

@hookimpl
def mooncake_transfer_drivers():
    return [DriverInfo("sound", frozenset({"dram"}), 5, lambda: Available(("dev[0]",)), load=lambda: None)]
"""
UNUSABLE = """
from mooncake_transfer.hooks import DriverInfo, Unavailable, hookimpl

@hookimpl
def mooncake_transfer_drivers():
    probe = lambda: Unavailable("libx.so not found; install libx")
    return [DriverInfo("unusable", frozenset({"dram"}), 6, probe, load=lambda: None)]
"""
NOWHERE = """
from mooncake_transfer.hooks import Available, DriverInfo, EndpointSpec, Unavailable, hookimpl

def endpoints(options):
    return [EndpointSpec("", {})] if options else Unavailable("it has no pool; set driver_options")

@hookimpl
def mooncake_transfer_drivers():
    return [DriverInfo("nowhere", frozenset({"dram"}), 7, Available, load=lambda: None, endpoints=endpoints)]
"""
BROKEN = "import a_vendor_library_that_is_not_there"


class Installed:
    """Decides which driver plugins are there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[EntryPoint] = []

    def plugin(self, name: str, source: str) -> None:
        (self.folder / f"doctor_{name}.py").write_text(source)
        self.found.append(EntryPoint(name, f"doctor_{name}", plugins.DRIVER_GROUP))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    monkeypatch.syspath_prepend(str(tmp_path))
    machine = Installed(tmp_path)
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: machine.found if group == plugins.DRIVER_GROUP else []
    )
    plugins.driver_plugins.cache_clear()
    yield machine
    plugins.driver_plugins.cache_clear()


def doctor(*arguments: str):
    return CliRunner(env={"COLUMNS": "80"}).invoke(build_app(), ["doctor", *arguments])


def test_where_nothing_is_installed_it_says_how_to_install_and_fails(installed: Installed) -> None:
    result = doctor()
    assert result.exit_code == 1
    assert "no driver is installed" in result.output
    assert "pip install mooncake-transfer[shm,tcp]" in result.output
    assert "locked memory" in result.output


def test_a_usable_driver_makes_a_healthy_machine(installed: Installed) -> None:
    installed.plugin("sound", SOUND)
    installed.plugin("unusable", UNUSABLE)
    result = doctor()
    assert result.exit_code == 0, result.output
    assert "dev[0]" in result.output
    assert "libx.so not found; install libx" in result.output
    assert "usable drivers, best first: sound" in result.output


def test_no_remedy_is_cut_where_the_terminal_is_narrow(installed: Installed) -> None:
    installed.plugin("unusable", UNUSABLE)
    result = CliRunner(env={"COLUMNS": "40"}).invoke(build_app(), ["doctor"])
    assert "…" not in result.output
    together = "".join(result.output.split())
    for limit in machine_limits():
        assert "".join(limit.name.split()) in together
        assert "".join(limit.remedy.split()) in together


def test_drivers_that_cannot_be_used_fail_with_their_reasons(installed: Installed) -> None:
    installed.plugin("unusable", UNUSABLE)
    result = doctor("--json")
    report = json.loads(result.output)
    assert result.exit_code == 1
    assert report["healthy"] is False
    assert "none of the installed drivers" in report["remedy"]
    assert report["drivers"][0]["reason"] == "libx.so not found; install libx"


def test_a_driver_without_anything_to_open_is_not_usable_until_it_is_configured(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.plugin("nowhere", NOWHERE)
    result = doctor("--json")
    (found,) = json.loads(result.output)["drivers"]
    assert result.exit_code == 1
    assert (found["usable"], found["reason"]) == (False, "it has no pool; set driver_options")
    monkeypatch.setenv("MOONCAKE_TRANSFER_DRIVER_OPTIONS__NOWHERE__POOL", "/dev/pool")
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    assert [driver["usable"] for driver in json.loads(result.output)["drivers"]] == [True]


def test_options_that_a_driver_refuses_are_told(installed: Installed) -> None:
    installed.plugin("refusing", NOWHERE.replace("return [Endpoint", "raise ValueError('no such pool')#"))
    (found,) = json.loads(doctor("--json").output)["drivers"]
    assert found["usable"] is False
    assert found["reason"] == "it does not start: no such pool"


def test_a_configuration_that_cannot_be_used_is_told(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.plugin("sound", SOUND)
    monkeypatch.setenv("MOONCAKE_TRANSFER_PORT", "99999")
    result = doctor("--json")
    report = json.loads(result.output)
    assert (result.exit_code, report["healthy"]) == (1, False)
    assert "port 99999 is outside" in report["remedy"]


def test_a_broken_plugin_is_named_and_fails(installed: Installed) -> None:
    installed.plugin("sound", SOUND)
    installed.plugin("broken", BROKEN)
    assert "a_vendor_library_that_is_not_there" in doctor().output
    result = doctor("--json")
    report = json.loads(result.output)
    assert result.exit_code == 1
    assert [driver["usable"] for driver in report["drivers"]] == [True]
    assert [plugin["name"] for plugin in report["broken_plugins"]] == ["broken"]
    assert "reinstall" in report["remedy"]
