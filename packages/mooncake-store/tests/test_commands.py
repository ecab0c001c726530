"""``mooncake store`` commands on a running store, as a person or a script calls them."""

import io
import json
import re
import subprocess
import sys

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from mooncake_store import TenantPolicy
from mooncake_store.cli import mooncake_cli
from mooncake_store.commands import objects
from mooncake_store.commands.watching import render
from mooncake_store.testing.processes import StoreProcess
from mooncake_transfer.cli import build_app

MIB = 1 << 20


@pytest.fixture
def engine(world):
    return world.engine()


@pytest.fixture
def store(world, engine):
    return world.store(engine, lend=8 * MIB)


@pytest.fixture
def command(store, engine, monkeypatch):
    """Runs ``mooncake store ...`` on the store; gives status, output and errors."""
    monkeypatch.setenv("MOONCAKE_STORE_MASTER", engine.address)
    runner, app = CliRunner(), build_app()

    def ran(*arguments, status=0, given=None):
        result = runner.invoke(app, ["store", *map(str, arguments)], input=given)
        assert result.exit_code == status, (result.stdout, result.stderr, result.exception)
        return result

    return ran


def test_files_and_folders_are_stored_and_come_back_as_they_were(command, store, tmp_path, content):
    files = {"one.bin": content(b"1", 1, 3 * MIB), "sub/two": content(b"2", 1, 10), "sub/empty": b""}
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    command("put", tmp_path / "in", "--prefix", "m/")
    assert {name: store.get(f"m/{name}") for name in files} == files
    command("get", *(f"m/{name}" for name in files), "--output", tmp_path / "out")
    assert {name: (tmp_path / "out" / "m" / name).read_bytes() for name in files} == files
    command("get", "m/one.bin", "-o", tmp_path / "single")
    assert (tmp_path / "single").read_bytes() == files["one.bin"]
    assert not list(tmp_path.rglob("*.partial"))


def test_standard_input_is_a_value_and_standard_output_takes_one(command, store):
    command("put", "-", "--key", "k", given=b"\x00\xffvalue")
    assert store.get("k") == b"\x00\xffvalue"
    assert command("get", "k").stdout_bytes == b"\x00\xffvalue"
    command("put", "-", "--key", "00ff", "--hex", given=b"1")
    assert store.get(b"\x00\xff") == b"1"


def test_a_taken_key_is_told_and_others_are_stored(command, store, tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    store.put("a", b"old")
    result = command("put", tmp_path, status=1)
    assert "1 of 2 not stored; a: key b'a' exists" in result.stderr
    assert (store.get("a"), store.get("b")) == (b"old", b"b")
    told = json.loads(command("put", tmp_path, "--json", status=1).stdout)
    assert [(one["key"], bool(one["error"])) for one in told] == [("a", True), ("b", True)]
    command("put", tmp_path, "--if-exists", "replace")
    assert store.get("a") == b"a"


def test_a_bulk_put_goes_on_after_a_value_beyond_the_quota(world, monkeypatch, tmp_path, fast):
    limits = {"": TenantPolicy(quota_bytes=64 << 10)}
    engine = world.engine()
    store = world.store(engine, lend=8 * MIB, config=msgspec.structs.replace(fast, tenants=limits))
    for name, nbytes in (("a", 100), ("b", 100_000), ("c", 100)):
        (tmp_path / name).write_bytes(bytes(nbytes))
    arguments = ["store", "put", str(tmp_path), "--json", "--master", engine.address]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert ["quota" in one["error"] for one in told] == [False, True, False]
    assert store.batch_exist(["a", "b", "c"]) == [True, False, True]


def test_a_bulk_put_waits_as_long_as_the_rate_of_its_tenant_asks_for(
    world, monkeypatch, tmp_path, fast, content
):
    limits = {"": TenantPolicy(keys_per_s=2.0)}
    engine = world.engine()
    world.store(engine, lend=8 * MIB, config=msgspec.structs.replace(fast, tenants=limits))
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(content(b"r", number, 100))
    arguments = ["store", "put", str(tmp_path), "--json", "--master", engine.address]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.stdout
    assert [one["error"] for one in json.loads(result.stdout)] == [""] * 4
    monkeypatch.setattr(objects, "RATE_WAIT_S", 0.0)
    refused = CliRunner().invoke(build_app(), [*arguments, "--if-exists", "replace"])
    assert refused.exit_code == 1
    assert all("wait" in one["error"] or not one["error"] for one in json.loads(refused.stdout))
    assert any(one["error"] for one in json.loads(refused.stdout))


def test_missing_keys_have_a_status_of_their_own_and_leave_no_file(command, store, tmp_path):
    store.put("there", b"1")
    result = command("get", "there", "not there", "-o", tmp_path / "out", status=1)
    assert "1 of 2 not read; key b'not there'" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["there"]
    assert "not there" in command("rm", "there", "not there", status=1).stderr
    assert store.batch_exist(["there"]) == [False]


def test_a_key_cannot_lead_out_of_the_folder(command, store, tmp_path):
    store.put("../evil", b"1")
    store.put("x", b"1")
    result = command("get", "../evil", "x", "-o", tmp_path / "out", status=2)
    assert "leads out of" in result.stderr
    assert not (tmp_path / "evil").exists()


def test_sizes_and_numbers_are_told_as_text_and_as_json(command, store):
    store.put("a", bytes(1234))
    assert command("stat", "a").stdout.split() == ["a", "1234"]
    told = json.loads(command("stat", "a", "b", "--json", status=1).stdout)
    assert told == [{"key": "a", "bytes": 1234}, {"key": "b", "bytes": None}]
    numbers = json.loads(command("stat", "--json").stdout)
    assert (numbers["objects"], numbers["capacity_bytes"]) == (1, 8 * MIB)
    assert command("stat").stdout.splitlines()[0].split() == ["objects", "1"]


def test_values_are_pinned_and_let_go(command, store):
    store.put("a", bytes(5000))
    command("pin", "a")
    assert store.stats().pinned_bytes == 8192
    assert "1 of 2 are not there, the first is 'b'" in command("pin", "a", "b", "--release", status=1).stderr
    command("pin", "a", "--soft-s", "60")
    assert store.stats().pinned_bytes == 0
    command("pin", "a", "--soft-s", "60", "--release", status=2)


def test_a_put_says_how_its_value_is_kept_and_a_session_ends(command, store, tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    for key, session in (("a", "chat"), ("b", "chat"), ("c", "other")):
        command("put", str(tmp_path / "file"), "--key", key, "--session", session)
    assert json.loads(command("end-session", "chat", "--json").stdout) == {"values": 2}
    assert command("end-session", "chat").stdout == "2 values are the first to go\n"
    assert store.batch_exist(["a", "b", "c"]) == [True, True, True]
    kept = ["--replicas", "2", "--priority", "3", "--group", "g"]
    command("put", str(tmp_path / "file"), "--key", "d", *kept)
    refused = command("put", str(tmp_path / "file"), "--key", "e", "--priority", "99", status=2)
    assert "priority is 99" in refused.stderr


def test_values_are_listed_and_removed_by_pattern_and_all_at_once(command, store, eventually):
    for key in "abc":
        store.put(key, b"1")
    assert command("rm", "--all").stdout == "3 removed\n"
    assert store.stats().objects == 0
    for key in ("m/1", "m/2", "n"):
        store.put(key, b"12")
    eventually(lambda: command("ls").stdout.split() == ["2", "m/1", "2", "m/2", "2", "n"])
    assert json.loads(command("ls", "--prefix", "m/", "2$", "--json").stdout)[0]["key"] == "m/2"
    assert command("rm", "--regex", "^m/").stdout == "2 removed\n"
    command("rm", status=2)
    command("rm", "a", "--all", status=2)


def test_top_shows_segments_hot_objects_and_requests(command, store):
    store.put("a", bytes(MIB))
    store.get("a")
    shown = command("top", "--once", "--interval-s", "0.05").stdout
    for words in ("1 objects", "1.0 MiB of 8.0 MiB", "Locate", "hot object"):
        assert words in shown, shown
    assert re.search(r"\n\s*a\s+1\s", shown), f"the key of what is hot: {shown}"
    told = json.loads(command("top", "--once", "--json", "--interval-s", "0.05").stdout)
    assert told["stats"]["objects"] == 1
    assert "--json needs --once" in command("top", "--json", status=2).stderr
    for interval in ("inf", "nan"):
        assert "interval-s" in command("top", "--once", "--interval-s", interval, status=2).stderr


def test_what_happens_between_two_looks_of_different_masters_is_not_made_up(store):
    store.put("a", b"1")
    store.get("a")
    report = store.report()
    report.epoch += 1
    before = store.report()
    console = Console(width=200, file=io.StringIO())
    console.print(render(before, report))
    assert "no hits in 0 reads/s" in console.file.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["put", "-"], "needs --key"),
        (["put", "no such file"], "is no file that can be read"),
        (["get", "a", "b"], "need --output"),
        (["get", "zz", "--hex"], "is no hexadecimal key"),
        (["rest", "--log-level", "NOPE"], "log level 'NOPE' is unknown"),
        (["node", "--lend", "1M", "--log-level", "NOPE"], "log level 'NOPE' is unknown"),
        (["rest", "--tls-cert", "x"], "needs both --tls-cert and --tls-key"),
        (["rest", "--token-file", "no such file"], "cannot be read"),
    ],
)
def test_wrong_use_ends_with_status_2_and_says_what_is_wrong(command, arguments, said):
    assert said in command(*arguments, status=2).stderr


def test_a_master_with_an_unknown_log_level_ends_in_one_line() -> None:
    command = [sys.executable, "-m", "mooncake_transfer.cli", "store", "master", "--log-level", "NOPE"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert "log level 'NOPE' is unknown" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_store_that_is_not_named_or_does_not_answer_is_told_apart(command, monkeypatch):
    assert "no store master can be reached" in command("stat", "-m", "127.0.0.1:1", status=3).stderr
    monkeypatch.delenv("MOONCAKE_STORE_MASTER")
    assert "--master HOST:PORT" in command("stat", status=2).stderr


def test_every_command_explains_itself():
    app = build_app()
    assert mooncake_cli is not None
    for name in ("put", "get", "stat", "rm", "rest", "top", "master"):
        result = CliRunner().invoke(app, ["store", name, "--help"])
        assert result.exit_code == 0


def test_a_master_serves_http_and_so_does_a_gateway_elsewhere(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with StoreProcess("master", "--http-port", "0", "--http-token-file", str(tmp_path / "token")) as master:
        answer = httpx.get(
            f"{master.ready['url']}/v1/stats", headers={"Authorization": "Bearer secret"}, timeout=20
        )
        assert answer.json()["objects"] == 0
        assert httpx.get(f"{master.ready['url']}/v1/stats", timeout=20).status_code == 401
        assert "Mooncake store" in httpx.get(master.ready["url"], timeout=20).text
        with StoreProcess("rest", "--master", master.address, "--port", "0") as gateway:
            health = httpx.get(f"{gateway.ready['url']}/health", timeout=20)
            assert health.json() == {"status": "ok"}
            assert gateway.end()[0] == 0
        lend = ["--lend", "1M", "--metrics-port", "0", "--master", master.address]
        with StoreProcess("node", *lend, "--kv-events", "tcp://127.0.0.1:*") as node:
            metrics = httpx.get(node.ready["metrics"], timeout=20).text
            assert "mooncake_store_client_hits_total" in metrics
            assert "mooncake_transfer_region_bytes" in metrics
            assert node.ready["kv_events"].startswith("tcp://127.0.0.1:")
            assert node.end()[0] == 0
        assert master.end()[0] == 0
