"""``mooncake bench``: measures between two processes, and ends cleanly when it cannot."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.bench import LocalTarget, Plan, Point, parse_size, request_region, verify
from mooncake_transfer.bench.measurement import BytesDiffer, Result
from mooncake_transfer.bench.verdict import verdict
from mooncake_transfer.cli import bench, build_app
from mooncake_transfer.drivers import DriverStatus
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl
from mooncake_transfer.plugins import driver_plugins

QUICK = ("--seconds", "0.02", "--sizes", "64,4K", "--batches", "1,8", "--threads", "1,2")


def mooncake(*arguments: str):
    return CliRunner(env={"COLUMNS": "80"}).invoke(build_app(), [*arguments])


def test_every_combination_is_measured_between_two_processes(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    result = mooncake("bench", "transfer", *QUICK, "--drivers", "shm,tcp", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "fastest:" in result.output
    found = json.loads(file.read_text())
    assert len(found) == 2 * 2 * 2 * 2 * 2
    assert {one["point"]["driver"] for one in found} == {"shm", "tcp"}
    for one in found:
        point = one["point"]
        assert one["calls"] >= 3 * point["threads"]
        assert 0 < one["p50_us"] <= one["p90_us"] <= one["p99_us"] <= one["p999_us"] <= one["max_us"]
        assert one["gb_per_s"] > 0
        assert one["cores"] > 0


def test_no_figure_is_cut_where_the_terminal_is_narrow(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ("--seconds", "0.02", "--sizes", "4K", "--batches", "64", "--threads", "2")
    result = CliRunner(env={"COLUMNS": "40"}).invoke(
        build_app(), ["bench", "transfer", *arguments, "--drivers", "shm", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    (header,) = (line for line in result.output.splitlines() if "p99.9" in line)
    assert header.split()[-1] == "cores"
    for one in json.loads(file.read_text()):
        assert f"{one['gb_per_s']:.3g}" in result.output
        assert f"{one['transfers_per_s']:,.0f}" in result.output


def test_a_target_of_its_own_process_is_used_and_ends_on_sigterm() -> None:
    ready, ready_end = os.pipe()
    command = [sys.executable, "-m", "mooncake_transfer.cli", "bench", "serve", "--ready-fd", str(ready_end)]
    with subprocess.Popen(command, pass_fds=(ready_end,)) as process:
        os.close(ready_end)
        with os.fdopen(ready) as pipe:
            address = json.loads(pipe.read())["address"]
        result = mooncake("bench", "transfer", *QUICK, "--drivers", "tcp", "--target", address)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert result.exit_code == 0, result.output
    assert "this side kept" in result.output


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("--sizes", "4X"), 2, "'4X' is no size"),
        (("--threads", "0"), 2, "'0' is not a number of threads"),
        (("--batches", "1,x"), 2, "'x' is not a number of blocks"),
        (("--json", "/nowhere/there/results.json"), 2, "cannot write results to /nowhere/there"),
        (("--ops", "erase"), 2, "unknown operation ['erase']"),
        (("--drivers", "nowhere"), 2, "driver 'nowhere' is not installed"),
        (("--sizes", "4M", "--max-size", "1M"), 2, "nothing to measure"),
        (("--plot", "picture.bmp"), 2, "must end in .png or .svg"),
        (("--drivers", "tcp", "--target", "127.0.0.1:1"), 1, "PeerUnreachable"),
    ],
)
def test_wrong_use_and_failure_are_told_in_a_line(
    arguments: tuple[str, ...], status: int, reason: str
) -> None:
    result = mooncake("bench", "transfer", *arguments)
    assert result.exit_code == status
    assert reason in result.output
    assert "Traceback" not in result.output


NOWHERE = DriverInfo(
    "nowhere",
    frozenset({"dram"}),
    1000,
    Available,
    load=lambda: None,
    trusted_probe=True,
    endpoints=lambda options: Unavailable("it has no pool"),
)


class NowherePlugin:
    @hookimpl
    def mooncake_transfer_drivers(self) -> list[DriverInfo]:
        return [NOWHERE]


@pytest.fixture
def nowhere() -> Iterator[None]:
    """One more driver: its probe is content, yet it has nothing to open."""
    manager = driver_plugins().manager
    plugin = NowherePlugin()
    manager.register(plugin)
    yield
    manager.unregister(plugin)


@pytest.mark.usefixtures("nowhere")
def test_a_driver_that_moves_nothing_here_is_left_out_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ("--seconds", "0.02", "--sizes", "64", "--batches", "1", "--json", str(file))
    result = mooncake("bench", "transfer", *arguments)
    assert result.exit_code == 0, result.output
    assert re.search("left out: nowhere: .*it has no pool", result.output)
    found = {one["point"]["driver"] for one in json.loads(file.read_text())}
    assert found >= {"shm", "tcp"}
    assert "nowhere" not in found


@pytest.mark.usefixtures("nowhere")
def test_where_no_driver_moves_anything_the_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "probe_drivers", lambda _: [DriverStatus("nowhere", 1000, True)])
    result = mooncake("bench", "transfer", *QUICK)
    assert result.exit_code == 2, result.output
    assert "no driver moves memory here (nowhere: " in result.output
    result = mooncake("bench", "transfer", *QUICK, "--drivers", "nowhere,tcp")
    assert result.exit_code == 2, result.output
    assert "left out" not in result.output


def test_an_engine_that_is_no_target_is_told_apart() -> None:
    with TransferEngine(TransferConfig(drivers=("tcp",))) as other:
        result = mooncake("bench", "transfer", *QUICK, "--drivers", "tcp", "--target", other.address)
    assert result.exit_code == 2
    assert "is `mooncake bench serve` running there?" in result.output


def test_a_target_lends_no_more_than_it_was_told_to() -> None:
    with LocalTarget(1 << 16) as target, TransferEngine(TransferConfig(drivers=("tcp",))) as engine:
        assert request_region(engine, target.address, 1 << 16).nbytes == 1 << 16
        with pytest.raises(ConfigError, match="--max-size allows 65536"):
            request_region(engine, target.address, (1 << 16) + 1)
        assert target.cpu_s() > 0


def test_the_check_finds_bytes_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point("tcp", "write", 64, 4, 2)
    config = TransferConfig(drivers=("tcp",))
    with TransferEngine(config) as owner, TransferEngine(config) as engine:
        local = engine.allocate(point.region_bytes)
        remote = engine.import_region(owner.allocate(point.region_bytes).descriptor())
        verify(engine, local, remote, point)
        read = engine.read

        def read_and_spoil(*arguments):
            transfer = read(*arguments)
            transfer.wait()
            np.frombuffer(local.view(), dtype=np.uint8)[128] ^= 1
            return transfer

        monkeypatch.setattr(engine, "read", read_and_spoil)
        with pytest.raises(BytesDiffer, match="1 of 256 bytes came back changed over tcp"):
            verify(engine, local, remote, point)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_results_are_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra 'bench')")
    file = tmp_path / f"picture{suffix}"
    result = mooncake("bench", "transfer", *QUICK, "--drivers", "shm", "--plot", str(file))
    assert result.exit_code == 0, result.output
    start = {".png": b"\x89PNG", ".svg": b"<?xml"}[suffix]
    assert file.read_bytes().startswith(start)


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = mooncake("bench", "transfer", "--plot", "picture.png")
    assert result.exit_code == 2
    assert "pip install mooncake-transfer[bench]" in result.output


def test_blocks_of_a_batch_lie_apart_and_threads_do_not_share_any() -> None:
    point = Point("tcp", "write", 64, 3, 2)
    first, second = point.blocks(0), point.blocks(1)
    assert first[:, 0].tolist() == [0, 128, 256]
    assert second[:, 1].tolist() == [384, 512, 640]
    assert point.region_bytes == 768


def test_a_plan_leaves_out_what_needs_too_much_memory() -> None:
    plan = Plan(("tcp",), ("read",), sizes=(64, 1 << 20), batches=(1,), max_bytes=4096)
    assert [point.size for point in plan.points()] == [64]
    assert plan.skipped() == 1


@pytest.mark.parametrize(("text", "size"), [("64", 64), ("4K", 4096), ("1 MiB", 1 << 20), ("2g", 2 << 30)])
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_the_verdict_names_cores_or_driver() -> None:
    point = Point("tcp", "write", 64, 1, 1)
    busy = Result(point, 10, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, cores=1.95)
    calm = Result(point, 10, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, cores=1.0)
    assert "the cores are the limit" in verdict([busy], both_sides=True, cores=2)
    assert "driver tcp is the limit" in verdict([calm], both_sides=True, cores=2)
    assert "more threads may be faster" in verdict([calm], both_sides=False, cores=2)
