"""The calls of nvme-cli, with a program in its place that answers as told, and the commands of mooncake."""

from __future__ import annotations

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
    monkeypatch.setattr(fabrics, "DEVICES", tmp_path / "block")
    return tmp_path


def disk(folder: Path, name: str, nqn: str, nsid: int) -> None:
    place = folder / "block" / name
    (place / "device").mkdir(parents=True)
    (place / "device/subsysnqn").write_text(f"{nqn}\n")
    for file, text in (
        ("nsid", str(nsid)),
        ("size", "2048"),
        ("uuid", "0f0e0d0c-0b0a-0908-0706-050403020100"),
    ):
        (place / file).write_text(f"{text}\n")


def test_a_discovery_log_becomes_subsystems(program: Path) -> None:
    record = '{"trtype":"tcp","traddr":"192.0.2.1","trsvcid":"4420 ","subnqn":"' + NQN + '"}'
    (program / "answer").write_text(f"echo '{{\"records\":[{record}]}}'\n")
    assert fabrics.discover("192.0.2.1") == [fabrics.Subsystem(NQN, "tcp", "192.0.2.1", "4420")]
    assert (program / "called").read_text() == "discover -t tcp -a 192.0.2.1 -s 4420 -o json\n"


def test_a_connected_subsystem_shows_its_block_devices_and_is_not_connected_twice(program: Path) -> None:
    disk(program, "nvme0n1", "nqn.other", 1)
    assert fabrics.connect(NQN, "192.0.2.1", loss_timeout_s=30) == []
    disk(program, "nvme1n2", NQN, 2)
    (found,) = fabrics.connect(NQN, "192.0.2.1")
    assert (found.device, found.nsid, found.nbytes) == (Path("/dev/nvme1n2"), 2, 1 << 20)
    assert found.uuid == "0f0e0d0c0b0a09080706050403020100"
    fabrics.disconnect(NQN)
    assert (program / "called").read_text().splitlines() == [
        f"connect -t tcp -a 192.0.2.1 -s 4420 -n {NQN} --ctrl-loss-tmo=30",
        f"disconnect -n {NQN}",
    ]


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
    done = runner.invoke(app, ["nvmeof", "connect", NQN, "192.0.2.1"])
    assert "/dev/nvme1n2  namespace 2, 1048576 bytes" in done.output
