"""The calls of nvme-cli, with a program in its place that answers as told, and the commands of mooncake."""

from __future__ import annotations

import queue
import shutil
import signal
import subprocess
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
    place.mkdir(parents=True, exist_ok=True)
    (place / "subsysnqn").write_text(f"{nqn}\n")
    (place / "address").write_text("traddr=192.0.2.1,trsvcid=4420\n")
    (place / "state").write_text(f"{state}\n")


def connecting(folder: Path, name: str) -> None:
    """Have ``nvme connect`` make a controller that is live, as the kernel does before it returns."""
    controller(folder / "made", name, NQN, "live")
    (folder / "answer").write_text(
        f'[ "$1" != connect ] || {{ mkdir -p {folder}/controllers && cp -r {folder}/made/controllers/{name} '
        f"{folder}/controllers; }}\n"
    )


class Clock:
    """Stands for the module time: a sleep takes no time, and something may happen in it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._meanwhile()


def test_a_discovery_log_becomes_subsystems(program: Path) -> None:
    record = '{"trtype":"tcp","traddr":"192.0.2.1","trsvcid":"4420 ","subnqn":"' + NQN + '"}'
    (program / "answer").write_text(f"echo '{{\"records\":[{record}]}}'\n")
    assert fabrics.discover("192.0.2.1") == [fabrics.Subsystem(NQN, "tcp", "192.0.2.1", "4420")]
    assert (program / "called").read_text() == "discover -t tcp -a 192.0.2.1 -s 4420 -o json\n"


def test_a_connected_subsystem_shows_its_block_devices_and_is_not_connected_twice(program: Path) -> None:
    disk(program, "nvme0n1", "nqn.other", 1)
    connecting(program, "nvme1")
    assert fabrics.connect(NQN, "192.0.2.1", loss_timeout_s=30) == []
    disk(program, "nvme1n2", NQN, 2)
    node(program, "nvme1n2")
    (found,) = fabrics.connect(NQN, "192.0.2.1")
    assert (found.device, found.nsid, found.nbytes) == (program / "nodes/nvme1n2", 2, 1 << 20)
    assert found.uuid == "0f0e0d0c0b0a09080706050403020100"
    fabrics.disconnect(NQN)
    assert (program / "called").read_text().splitlines() == [
        f"connect -t tcp -a 192.0.2.1 -s 4420 -n {NQN} --ctrl-loss-tmo=30",
        f"list-ns {program}/nodes/nvme1",
        f"list-ns {program}/nodes/nvme1",
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


def test_connect_waits_for_a_lost_connection_to_come_back(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller(program, "nvme1", NQN, "connecting")
    monkeypatch.setattr(fabrics, "time", Clock(lambda: None))
    said = r"no live connection after 30 s: nvme1 to traddr=192\.0\.2\.1,trsvcid=4420 is connecting"
    with pytest.raises(PeerUnreachable, match=said):
        fabrics.connect(NQN, "192.0.2.1")
    assert not (program / "called").exists()  # a lost one is not asked: it would not answer
    (program / "answer").write_text('[ "$1" != list-ns ] || echo "[   0]:0x1"\n')
    disk(program, "nvme1n1", NQN, 1)
    node(program, "nvme1n1")
    monkeypatch.setattr(fabrics, "time", Clock(lambda: controller(program, "nvme1", NQN, "live")))
    assert [each.nsid for each in fabrics.connect(NQN, "192.0.2.1")] == [1]
    assert (program / "called").read_text() == f"list-ns {program}/nodes/nvme1\n"


def test_a_connection_that_is_given_up_is_waited_for_and_made_anew(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting(program, "nvme2")
    controller(program, "nvme1", NQN, "deleting")

    def gone() -> None:
        shutil.rmtree(program / "controllers/nvme1")

    monkeypatch.setattr(fabrics, "time", Clock(gone))
    assert fabrics.connect(NQN, "192.0.2.1") == []
    called = [line.split()[0] for line in (program / "called").read_text().splitlines()]
    assert called == ["connect", "list-ns"]
    controller(program, "nvme2", NQN, "deleting (no IO)")
    monkeypatch.setattr(fabrics, "time", Clock(lambda: None))
    with pytest.raises(PeerUnreachable, match=r"after 30 s: nvme2 to .* is deleting \(no IO\); see that"):
        fabrics.connect(NQN, "192.0.2.1")


def test_one_path_that_answers_is_enough(program: Path) -> None:
    (program / "answer").write_text(
        'case "$2" in */nvme1) echo "passthru: Input/output error" >&2; exit 5;; esac; echo "[   0]:0x1"\n'
    )
    controller(program, "nvme1", NQN, "live")  # its target has gone: the kernel has not noticed yet
    controller(program, "nvme2", NQN, "live")
    disk(program, "nvme1n1", NQN, 1)
    node(program, "nvme1n1")
    assert [each.nsid for each in fabrics.connect(NQN, "192.0.2.1")] == [1]
    (program / "answer").write_text("echo $2: Input/output error >&2; exit 5\n")
    said = f"no path to {NQN} answers: .*nvme1: Input/output error; .*nvme2: Input/output error"
    with pytest.raises(PeerUnreachable, match=said):
        fabrics.connect(NQN, "192.0.2.1")


def test_a_path_that_comes_back_is_waited_for_when_the_other_fails(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program / "answer").write_text('case "$2" in */nvme1) exit 5;; esac; echo "[   0]:0x1"\n')
    controller(program, "nvme1", NQN, "live")
    controller(program, "nvme2", NQN, "connecting")
    disk(program, "nvme1n1", NQN, 1)
    node(program, "nvme1n1")
    rests = iter(("connecting", "connecting", "live"))
    monkeypatch.setattr(fabrics, "time", Clock(lambda: controller(program, "nvme2", NQN, next(rests))))
    assert [each.nsid for each in fabrics.connect(NQN, "192.0.2.1")] == [1]
    asked = [f"list-ns {program}/nodes/{name}" for name in ("nvme1", "nvme2")]
    assert (program / "called").read_text().splitlines() == asked, "one that failed is not asked again"


def test_a_path_that_does_not_answer_leaves_time_for_the_others(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(lambda: None)
    limits_s = []

    def nvme(arguments: list[str], timeout_s: float) -> str:
        limits_s.append(timeout_s)
        if arguments[1].endswith("/nvme3"):
            return "[   0]:0x1\n"
        clock.now_s += timeout_s
        raise PeerUnreachable("it did not end")

    monkeypatch.setattr(fabrics, "time", clock)
    monkeypatch.setattr(fabrics, "_nvme", nvme)
    for name in ("nvme1", "nvme2", "nvme3"):
        controller(program, name, NQN, "live")
    disk(program, "nvme1n1", NQN, 1)
    node(program, "nvme1n1")
    assert [each.nsid for each in fabrics.connect(NQN, "192.0.2.1")] == [1]
    assert limits_s == [10, 10, 10]


def test_a_program_that_no_signal_ends_is_not_waited_for(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: queue.Queue[subprocess.Popen[str]] = queue.Queue()
    (program / "answer").write_text("exec sleep 60\n")
    with monkeypatch.context() as patch:
        # As in a request that the target leaves open.
        patch.setattr(subprocess.Popen, "kill", lambda process: killed.put(process))
        with pytest.raises(PeerUnreachable, match=r"did not end within 0\.2 s"):
            fabrics.disconnect(NQN, timeout_s=0.2)
        process = killed.get(timeout=30)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


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
    connecting(program, "nvme1")
    disk(program, "nvme1n2", NQN, 2)
    node(program, "nvme1n2")
    done = runner.invoke(app, ["nvmeof", "connect", NQN, "192.0.2.1"])
    assert "/nodes/nvme1n2  namespace 2, 1048576 bytes" in done.output
