"""The calls of nvme-cli, with a program in its place that answers as told, and the commands of mooncake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from nvme_target import NvmeTarget
from typer.testing import CliRunner

from mooncake_driver_nvmeof import cli, fabrics
from mooncake_transfer.errors import ConfigError, DriverUnavailable, PeerUnreachable

NQN = "nqn.2014-08.org.example:x"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder: ``nvme`` in it notes its arguments in ``called`` and runs ``answer``."""
    nvme = tmp_path / "nvme"
    nvme.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n. {tmp_path}/answer\n')
    nvme.chmod(0o755)
    (tmp_path / "answer").write_text("exit 0\n")
    monkeypatch.setattr(fabrics, "PROGRAM", str(nvme))
    for name in ("DEVICES", "CONTROLLERS", "NODES"):
        monkeypatch.setattr(fabrics, name, tmp_path / name.lower())
    return tmp_path


def disk(folder: Path, name: str, nqn: str, nsid: int) -> None:
    """A namespace as the kernel shows it, but for the node that opens it."""
    place = folder / "devices" / name
    (place / "device").mkdir(parents=True)
    (place / "device/subsysnqn").write_text(f"{nqn}\n")
    for file, text in (
        ("nsid", str(nsid)),
        ("size", "2048"),
        ("uuid", "0f0e0d0c-0b0a-0908-0706-050403020100"),
    ):
        (place / file).write_text(f"{text}\n")


def node(folder: Path, name: str) -> None:
    (folder / "nodes").mkdir(exist_ok=True)
    (folder / "nodes" / name).touch()


def controller(folder: Path, name: str, nqn: str, state: str) -> None:
    place = folder / "controllers" / name
    place.mkdir(parents=True)
    (place / "subsysnqn").write_text(f"{nqn}\n")
    (place / "state").write_text(f"{state}\n")


class Clock:
    """Stands for the module time: a sleep takes no time, and something may happen in it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
        self._meanwhile()


def test_a_discovery_log_becomes_subsystems(program: Path) -> None:
    record = '{"trtype":"tcp","traddr":"192.0.2.1","trsvcid":"4420 ","subnqn":"' + NQN + '"}'
    (program / "answer").write_text(f"echo '{{\"records\":[{record}]}}'\n")
    assert fabrics.discover("192.0.2.1") == [fabrics.Subsystem(NQN, "tcp", "192.0.2.1", "4420")]
    assert (program / "called").read_text() == "discover -t tcp -a 192.0.2.1 -s 4420 -o json\n"


def test_a_connected_subsystem_shows_its_block_devices_and_is_not_connected_twice(program: Path) -> None:
    disk(program, "nvme0n1", "nqn.other", 1)
    assert fabrics.connect(NQN, "192.0.2.1", loss_timeout_s=30) == []
    controller(program, "nvme1", NQN, "connecting")  # a lost one is not asked: it would not answer
    disk(program, "nvme1n2", NQN, 2)
    node(program, "nvme1n2")
    (found,) = fabrics.connect(NQN, "192.0.2.1")
    assert (found.device, found.nsid, found.nbytes) == (program / "nodes/nvme1n2", 2, 1 << 20)
    assert found.uuid == "0f0e0d0c0b0a09080706050403020100"
    fabrics.disconnect(NQN)
    assert (program / "called").read_text().splitlines() == [
        f"connect -t tcp -a 192.0.2.1 -s 4420 -n {NQN} --ctrl-loss-tmo=30",
        f"disconnect -n {NQN}",
    ]


def test_connect_waits_for_the_block_device_of_every_namespace(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program / "answer").write_text('[ "$1" != list-ns ] || echo "[   0]:0x1\n[   1]:0x12"\n')
    controller(program, "nvme1", NQN, "live")
    disk(program, "nvme1n1", NQN, 1)
    disk(program, "nvme1n2", NQN, 18)
    node(program, "nvme1n1")
    monkeypatch.setattr(fabrics, "time", Clock(lambda: None))
    with pytest.raises(PeerUnreachable, match="no block device of its namespaces 18 after 30 s; `dmesg`"):
        fabrics.connect(NQN, "192.0.2.1")
    monkeypatch.setattr(fabrics, "time", Clock(lambda: node(program, "nvme1n2")))
    assert [each.nsid for each in fabrics.connect(NQN, "192.0.2.1")] == [1, 18]
    assert set((program / "called").read_text().splitlines()) == {f"list-ns {program}/nodes/nvme1"}


def test_what_goes_wrong_is_told(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program / "answer").write_text(
        "echo 'Failed to write to /dev/nvme-fabrics: Connection refused' >&2; exit 1\n"
    )
    with pytest.raises(PeerUnreachable, match="Connection refused"):
        fabrics.connect(NQN, "192.0.2.1")
    (program / "answer").write_text("exec sleep 60\n")
    with pytest.raises(PeerUnreachable, match=r"did not end within 0\.2 s"):
        fabrics.discover("192.0.2.1", timeout_s=0.2)
    with pytest.raises(ConfigError, match="tcp, rdma, loop, fc"):
        fabrics.discover("192.0.2.1", transport="udp")
    monkeypatch.setattr(fabrics, "PROGRAM", "no-such-program")
    with pytest.raises(DriverUnavailable, match="nvme-cli"):
        fabrics.disconnect(NQN)


def test_the_commands_say_what_they_found_and_fail_in_words(program: Path) -> None:
    app = typer.Typer()
    cli.mooncake_cli(app)
    runner = CliRunner()
    with NvmeTarget(blocks=100) as target:
        done = runner.invoke(app, ["nvmeof", "identify", target.url])
        assert "51200 bytes in blocks of 512, test double SERIAL" in done.output
        assert done.exit_code == 0
    done = runner.invoke(app, ["nvmeof", "identify", "nvme-tcp://"])
    assert done.exit_code == 2
    disk(program, "nvme1n2", NQN, 2)
    node(program, "nvme1n2")
    done = runner.invoke(app, ["nvmeof", "connect", NQN, "192.0.2.1"])
    assert "/nodes/nvme1n2  namespace 2, 1048576 bytes" in done.output
