"""``mooncake metadata`` as a person meets it, and what its server refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.cli import build_app
from mooncake_transfer.registry.records import engine_key
from mooncake_transfer.testing.registry_servers import RegistryServer, metadata_server

COMMAND = [sys.executable, "-m", "mooncake_transfer.cli", "metadata"]
LIMIT_S = 90.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with metadata_server(tmp_path_factory.mktemp("server")) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=LIMIT_S) as client:
        yield client


def test_the_command_says_where_it_serves_and_ends_on_sigterm() -> None:
    readable, writable = os.pipe()
    command = [*COMMAND, "serve", "--port", "0", "--ready-fd", str(writable)]
    with subprocess.Popen(command, pass_fds=[writable], stderr=subprocess.PIPE) as process:
        os.close(writable)
        with os.fdopen(readable) as pipe:
            url = json.loads(pipe.readline())["url"]
        assert httpx.get(f"{url}/health", trust_env=False, timeout=LIMIT_S).text == "ok"
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0


def test_the_command_ends_with_its_parent() -> None:
    readable, writable = os.pipe()
    command = [*COMMAND, "serve", "--port", "0", "--lifeline-fd", str(readable)]
    with subprocess.Popen(command, pass_fds=[readable], stderr=subprocess.PIPE) as process:
        os.close(readable)
        os.close(writable)
        assert process.wait(LIMIT_S) == 70


def test_a_taken_port_and_bad_files_are_said_in_one_line(tmp_path: Path) -> None:
    app, runner, empty = build_app(), CliRunner(), tmp_path / "empty"
    empty.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, said in (
            (["--log-level", "NOPE"], "log level 'NOPE' is unknown; use DEBUG, INFO"),
            (["--port", "99999"], "--port 99999 is outside 0..65535"),
            (["--port", port], "choose another --port"),
            (["--port", "0", "--token-file", str(empty)], "is empty"),
            (["--port", "0", "--token-file", str(tmp_path / "none")], "cannot be read"),
            (["--port", "0", "--tls-cert", str(empty)], "both --tls-cert and --tls-key"),
            (["--port", "0", "--tls-cert", str(empty), "--tls-key", str(empty)], "cannot be used"),
        ):
            outcome = runner.invoke(app, ["metadata", "serve", *options])
            assert outcome.exit_code == 2
            assert said in outcome.stderr
            assert outcome.stderr.count("\n") == 1


def test_the_list_shows_engines_and_regions_but_no_keys(url: str) -> None:
    app, runner = build_app(), CliRunner()
    with TransferEngine(TransferConfig(registry=url, name="[red]worker 1")) as engine:
        region = engine.allocate(4096, name="kv/layer 0")
        engine.publish(region)
        listing = json.loads(runner.invoke(app, ["metadata", "list", url, "--json"]).stdout)
        assert listing["engines"]["[red]worker 1"]["address"] == engine.address
        assert listing["regions"] == {"[red]worker 1/kv/layer 0": {"epoch": engine.epoch}}
        shown = runner.invoke(app, ["metadata", "list", url], env={"COLUMNS": "200"}).stdout
        assert "[red]worker 1" in shown
        assert engine.address in shown
        assert "kv/layer 0" in shown
    missing = runner.invoke(app, ["metadata", "list", "http://127.0.0.1:1"])
    assert missing.exit_code == 1
    assert "check that it runs" in missing.stderr
    assert runner.invoke(app, ["metadata", "list", "nothing"]).exit_code == 2


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("PUT", "/v1/entry?key=a&ttl_s=1", b"x", {}, 428),
        ("PUT", "/v1/entry?key=a&ttl_s=0", b"x", {"If-None-Match": "*"}, 400),
        ("PUT", "/v1/entry?key=a&ttl_s=nan", b"x", {"If-None-Match": "*"}, 400),
        ("PUT", "/v1/entry?key=a&ttl_s=inf", b"x", {"If-None-Match": "*"}, 400),
        ("PUT", "/v1/entry?key=a", b"x", {"If-None-Match": "*"}, 400),
        ("PUT", "/v1/entry?key=a&ttl_s=1", bytes(MIB + 1), {"If-None-Match": "*"}, 413),
        ("PUT", f"/v1/entry?key={'a' * 5000}&ttl_s=1", b"x", {"If-None-Match": "*"}, 400),
        ("GET", "/v1/entry", b"", {}, 400),
        ("GET", "/v1/entry?key=never", b"", {}, 404),
        ("POST", "/v1/entries/renew", b"{", {}, 400),
        ("POST", "/v1/entries/renew", b'{"ttl_s":-1,"entries":{}}', {}, 400),
        ("POST", "/v1/entries/remove", b'{"entries":[1]}', {}, 400),
        ("DELETE", "/v1/entry?key=a", b"", {}, 405),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(
    client: httpx.Client, method: str, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    answer = client.request(method, path, content=body, headers=headers)
    assert answer.status_code == status
    assert answer.text


def test_curl_gets_an_entry_with_its_tag_and_may_replace_it(client: httpx.Client) -> None:
    path, new = f"/v1/entry?key={engine_key('by-hand')}&ttl_s=60", {"If-None-Match": "*"}
    assert client.put(path, content=b"1", headers=new).status_code == 204
    assert client.put(path, content=b"2", headers=new).status_code == 412
    tag = client.get(path).headers["etag"]
    assert client.put(path, content=b"2", headers={"If-Match": tag}).status_code == 204
    assert client.put(path, content=b"3", headers={"If-Match": tag}).status_code == 412
    assert client.get(path).content == b"2"


def test_the_metrics_count_entries_and_requests(tmp_path: Path) -> None:
    with metadata_server(tmp_path, token="secret") as server, _bearer(server) as client:
        put = f"/v1/entry?key={engine_key('a')}&ttl_s=60"
        client.put(put, content=b"1", headers={"If-None-Match": "*"})
        lines = client.get("/metrics").text.splitlines()
        assert "mooncake_metadata_entries 1.0" in lines
        assert 'mooncake_metadata_requests_total{what="put"} 1.0' in lines
        del client.headers["authorization"]
        assert client.get("/metrics").status_code == 401
        assert client.get("/v1/entries").status_code == 401
        assert client.get("/health").status_code == 200


def _bearer(server: RegistryServer) -> httpx.Client:
    base = f"http://{server.url.rpartition('@')[2]}"
    return httpx.Client(base_url=base, headers={"Authorization": "Bearer secret"}, trust_env=False)
