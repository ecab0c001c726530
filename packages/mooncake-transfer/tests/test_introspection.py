"""What an engine tells about itself, and what is worked out of two looks at it."""

import gc
import io
import json
import os
import signal
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.beacon import Beacon, engines_here
from mooncake_transfer.cli import build_app
from mooncake_transfer.cli.top import View, render
from mooncake_transfer.errors import EngineClosed
from mooncake_transfer.introspection import (
    Snapshot,
    SnapshotServer,
    ask_snapshot,
    latency_quantile_us,
    rail_rates,
    take_snapshot,
)
from mooncake_transfer.peer import Caller
from mooncake_transfer.rails import RailStatus

TCP = TransferConfig(drivers=("tcp",))
MIB = 1 << 20


@pytest.fixture
def pair():
    with TransferEngine(TCP) as owner, TransferEngine(TCP) as mover:
        yield owner, mover


def move(owner: TransferEngine, mover: TransferEngine, nbytes: int) -> None:
    with owner.allocate(nbytes, name="there") as there, mover.allocate(nbytes, name="here") as here:
        mover.write(here, mover.import_region(there.descriptor()), [[0, 0, nbytes]]).wait(10)


def rail(**changes: object) -> RailStatus:
    values: dict[str, object] = {
        "peer": "127.0.0.1:1", "driver": "tcp", "device": "", "remote_device": "", "state": "closed",
        "bytes": 0, "ops": 0, "errors": 0, "retries": 0, "bandwidth_bytes_per_s": 1e9,
        "in_flight_bytes": 0, "latency_buckets": [0] * 8, "last_error": "",
    }  # fmt: skip
    return RailStatus(**{**values, **changes})


def snapshot(taken_s: float, *rails: RailStatus, epoch: int = 1) -> Snapshot:
    return Snapshot("127.0.0.1:2", epoch, "host", 3, taken_s, 0, 0, {}, list(rails))


def test_any_peer_can_ask_an_engine_what_it_does(pair) -> None:
    owner, mover = pair
    kept = mover.allocate(4096)
    move(owner, mover, MIB)
    told = ask_snapshot(owner, mover.address, 5)
    assert (told.address, told.epoch) == (mover.address, mover.epoch)
    assert (told.regions, told.region_bytes) == (1, 4096)
    (moved,) = told.rails
    assert (moved.peer, moved.driver, moved.state) == (owner.address, "tcp", "closed")
    assert moved.bytes == MIB
    assert moved.ops == sum(moved.latency_buckets) >= 1
    assert told.drivers["tcp"]["bytes_written"] == MIB
    kept.close()


def test_a_snapshot_holds_no_key_of_a_region(pair) -> None:
    owner, mover = pair
    region = mover.allocate(4096, name="secret")
    move(owner, mover, 4096)
    assert region.key not in msgspec.msgpack.encode(take_snapshot(mover))


def test_a_server_of_snapshots_does_not_keep_its_engine_alive() -> None:
    engine = TransferEngine(TCP)
    serve = SnapshotServer(engine)
    caller = Caller(1, "127.0.0.1:1", 1)
    assert serve(b"", caller)
    engine.close()
    del engine
    gc.collect()
    with pytest.raises(EngineClosed):
        serve(b"", caller)


def test_rates_are_differences_over_the_time_between_two_looks() -> None:
    before = snapshot(10.0, rail(bytes=MIB, ops=1, errors=1, latency_buckets=[1, 0, 0, 0]))
    after = snapshot(12.0, rail(bytes=5 * MIB, ops=101, errors=3, latency_buckets=[1, 98, 1, 1]))
    (rate,) = rail_rates(before, after)
    assert rate.bytes_per_s == 2 * MIB
    assert rate.ops_per_s == 50
    assert rate.errors == 2
    assert (rate.p50_us, rate.p99_us) == (2.0, 4.0)


def test_another_incarnation_or_a_new_rail_is_not_compared_with_what_was_before() -> None:
    before = snapshot(10.0, rail(bytes=9 * MIB, ops=9))
    restarted = snapshot(11.0, rail(bytes=MIB, ops=1), epoch=2)
    assert rail_rates(before, restarted)[0].bytes_per_s == 0
    fewer = snapshot(11.0, rail(bytes=MIB, ops=1))
    assert rail_rates(before, fewer)[0].bytes_per_s == MIB
    assert rail_rates(None, before)[0].bytes_per_s == 0


def test_quantiles_are_upper_bounds_of_buckets() -> None:
    assert latency_quantile_us([0, 0, 0], 0.5) is None
    assert latency_quantile_us([0, 10, 0], 0.5) == 2.0
    assert latency_quantile_us([99, 0, 1], 0.99) == 1.0
    assert latency_quantile_us([98, 0, 2], 0.99) == 4.0


def top(*arguments: str):
    return CliRunner(env={"COLUMNS": "80"}).invoke(build_app(), ["top", *arguments])


def test_top_prints_rails_once_for_people_and_for_scripts(pair) -> None:
    owner, mover = pair
    move(owner, mover, MIB)
    result = top(mover.address, "--once", "--interval-s", "0.05")
    assert result.exit_code == 0, result.output
    assert owner.address in result.output
    assert "closed" in result.output
    result = top(mover.address, "--once", "--json", "--interval-s", "0.05")
    (view,) = json.loads(result.output)
    assert view["failure"] == ""
    assert view["snapshot"]["rails"][0]["bytes"] == MIB
    assert view["rates"][0]["bytes_per_s"] == 0


def test_top_cuts_nothing_in_80_columns() -> None:
    names = {"peer": "192.168.100.200:65535", "device": "192.168.100.1", "remote_device": "192.168.100.2"}
    error = "PeerUnreachable: 192.168.100.200:65535 does not answer, " * 3
    before = snapshot(1.0, rail(**names, latency_buckets=[0] * 22))
    busy = rail(**names, ops=99_999, errors=10_000, retries=20_000, latency_buckets=[0] * 20 + [1, 0],
                state="half-open", in_flight_bytes=999 * MIB, last_error=error)  # fmt: skip
    after = snapshot(2.0, busy)
    console = Console(width=80, file=io.StringIO())
    console.print(render([View("127.0.0.1:2", "", after, rail_rates(before, after))]))
    shown = console.file.getvalue()
    assert "…" not in shown
    for text in ("99,999", "10000", "20000", "999.0", "<=1.05 s", "half-open"):
        assert text in shown
    assert "".join(error.split()) in "".join(shown.split())


def test_top_shows_who_does_not_answer_beside_who_does(pair) -> None:
    owner, _ = pair
    result = top(owner.address, "127.0.0.1:1", "--once", "--json", "--interval-s", "0.05")
    assert result.exit_code == 1
    answered, silent = json.loads(result.output)
    assert answered["snapshot"]["address"] == owner.address
    assert silent["failure"].startswith("PeerUnreachable")
    assert silent["snapshot"] is None


@pytest.mark.parametrize("arguments", [("x",), ("127.0.0.1:x",), ("127.0.0.1:x", "--once")], ids=" ".join)
def test_top_refuses_an_address_that_is_none_at_once(arguments: tuple[str, ...]) -> None:
    result = top(*arguments)
    assert result.exit_code == 2
    assert "is not host:port" in result.output


@pytest.mark.parametrize("option", ["-1", "nan"])
def test_top_refuses_a_time_that_is_none(option: str) -> None:
    result = top("127.0.0.1:1", "--once", "--timeout-s", option)
    assert result.exit_code == 2
    assert "--timeout-s is" in result.output


@pytest.mark.parametrize("interval", ["inf", "nan", "1e10", "0"])
def test_top_refuses_an_interval_that_nobody_waits_for(interval: str) -> None:
    result = top("127.0.0.1:1", "--once", "--interval-s", interval)
    assert result.exit_code == 2
    assert "interval-s" in result.output


def test_top_finds_the_engines_of_this_host_by_itself(pair) -> None:
    owner, mover = pair
    shown = engines_here()
    assert shown[owner.address] == shown[mover.address] == os.getpid()
    views = json.loads(top("--once", "--json", "--interval-s", "0.05").output)
    assert {owner.address, mover.address} <= {view["address"] for view in views}
    mover.close()
    assert mover.address not in engines_here()


def test_an_address_that_does_not_fit_is_not_shown_in_part(caplog: pytest.LogCaptureFixture) -> None:
    beacon = Beacon()
    beacon.start("a" * 240 + ":7000")
    assert not [address for address in engines_here() if address.startswith("aaa")]
    assert "will not be found" in caplog.text
    beacon.stop()


def test_where_no_engine_runs_top_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["mooncake_transfer.cli.top"], "engines_here", dict)
    result = top("--once")
    assert result.exit_code == 2
    assert "no engine of this user runs on this host" in result.output


def test_json_without_once_is_wrong_use() -> None:
    result = top("127.0.0.1:1", "--json")
    assert result.exit_code == 2
    assert "--json needs --once" in result.output


def test_top_runs_until_it_is_interrupted(pair) -> None:
    owner, _ = pair
    command = [sys.executable, "-m", "mooncake_transfer.cli", "top", owner.address, "--interval-s", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT) if owner.address in process.stdout.readline() else process.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
