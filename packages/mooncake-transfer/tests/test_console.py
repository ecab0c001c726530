"""What commands print is what they were told: rich makes pictures of ``:ab:`` and tags of ``[fd00::2]``."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.cli import build_app
from mooncake_transfer.cli.doctor import Report
from mooncake_transfer.console import plain_console, print_line
from mooncake_transfer.drivers import DriverStatus
from mooncake_transfer.topology import Topology

PCI = "0000:ab:00.0"
HOST = "fd00:100:cd::2"
AWKWARD = (PCI, HOST, f"[{HOST}]:7000")


def shown(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(build_app(), [*arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("text", AWKWARD)
def test_a_line_is_printed_as_it_is(text: str) -> None:
    out = io.StringIO()
    print_line(plain_console(file=out, width=5), text)
    assert out.getvalue() == text + "\n"


@pytest.mark.parametrize("text", AWKWARD[:2])
def test_a_table_shows_what_is_in_its_cells(text: str) -> None:
    out = io.StringIO()
    table = Table("address")
    table.add_row(text)
    plain_console(file=out, width=80).print(table)
    assert text in out.getvalue()


@pytest.mark.parametrize("options", [["--json"], []])
def test_topology_keeps_addresses_of_devices(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    class Machine:
        def to_json(self) -> str:
            return json.dumps({"pci": PCI})

        def render_text(self) -> str:
            return f"nic0 {PCI}\n"

    monkeypatch.setattr(Topology, "discover", lambda override: Machine())
    assert PCI in shown("topology", *options)


def test_the_settings_keep_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_TRANSFER_HOST", HOST)
    assert HOST in shown("config", "show")
    assert json.loads(shown("config", "show", "--json"))["host"]["value"] == HOST


def test_the_doctor_keeps_addresses_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    status = DriverStatus("verbs", 1, True, (PCI,))
    report = Report(True, "", {"kernel": "6:ab:1"}, [status], [], [])
    # The package has the function by the name of its module.
    monkeypatch.setattr(sys.modules[Report.__module__], "examine", lambda: report)
    said = shown("doctor")
    assert PCI in said
    assert "6:ab:1" in said


def test_the_list_of_a_registry_keeps_addresses() -> None:
    with TransferEngine(TransferConfig(registry="memory:console", name="one", advertise_host=HOST)) as engine:
        assert engine.address.startswith(f"[{HOST}]:")
        assert engine.address in shown("metadata", "list", "memory:console")


def test_a_target_prints_the_command_that_reaches_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mooncake_transfer.cli", "bench", "serve"]
    environment = {**os.environ, "MOONCAKE_TRANSFER_ADVERTISE_HOST": HOST, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdout is not None
        line = target.stdout.readline()
        target.send_signal(signal.SIGTERM)
        assert target.wait(60) == 0
    assert line.startswith(f"mooncake bench transfer --target [{HOST}]:")
