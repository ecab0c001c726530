from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_transfer.cli import build_app
from mooncake_transformers._errors import ConfigError
from mooncake_transformers.config import WorkerConfig, format_bytes, parse_bytes


@pytest.fixture(autouse=True)
def _no_log_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)


def run_worker(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["worker", *arguments])
    return result.exit_code, result.output.replace("\n", " ")


def test_an_unknown_model_ends_the_command_with_status_2_and_a_reason(tmp_path: Path) -> None:
    status, output = run_worker("--model", str(tmp_path / "missing"))
    assert status == 2
    assert "error: UnknownModel: there is no folder" in output


def test_an_unknown_log_level_ends_the_command_with_status_2() -> None:
    status, output = run_worker("--log-level", "NOPE")
    assert status == 2
    assert "log level 'NOPE' is unknown" in output


def test_a_taken_port_ends_the_command_with_status_2_and_names_the_port(tiny_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        status, output = run_worker("--model", str(tiny_folder), "--port", port)
    assert status == 2
    assert f"cannot serve at 127.0.0.1:{port}" in output


def test_no_memory_for_the_pool_or_the_segment_ends_the_command_with_status_2(tiny_folder: Path) -> None:
    for option in ("--kv-pool", "--lend"):
        status, output = run_worker("--model", str(tiny_folder), option, "900000GiB")
        assert status == 2
        assert "MemoryUnavailable" in output


def test_a_master_that_is_not_there_ends_the_command_with_status_2(tiny_folder: Path) -> None:
    status, output = run_worker("--model", str(tiny_folder), "--kv-pool", "2MiB", "--store", "127.0.0.1:1")
    assert status == 2
    assert "MasterUnreachable" in output


def test_an_address_the_machine_does_not_have_ends_the_command_and_is_named(tiny_folder: Path) -> None:
    status, output = run_worker("--model", str(tiny_folder), "--host", "203.0.113.5")
    assert status == 2
    assert "this machine does not have the address 203.0.113.5" in output


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--lend", "1", "hold no KV block"),
        ("--block-tokens", "513", "longer than the model's context of 512"),
    ],
)
def test_blocks_that_can_never_be_used_end_the_command_with_status_2(
    tiny_folder: Path, option: str, value: str, reason: str
) -> None:
    status, output = run_worker("--model", str(tiny_folder), "--kv-pool", "2MiB", option, value)
    assert status == 2
    assert "ConfigError" in output
    assert reason in output


def test_an_unknown_dtype_is_refused_with_the_choices() -> None:
    status, output = run_worker("--dtype", "float99")
    assert status == 2
    assert "'float99'; it must be one of auto, float32, bfloat16, float16" in output


@pytest.mark.parametrize("command", ["worker", "serve"])
def test_help_shows_sizes_with_their_units(command: str) -> None:
    output = CliRunner().invoke(build_app(), [command, "--help"]).output
    assert "MiB" in output or "GiB" in output
    assert "536870912" not in output
    assert "1073741824" not in output


@pytest.mark.parametrize("size", [0, 1, 4097, 1536, 512 << 20, 1 << 30])
def test_a_size_is_written_as_it_can_be_read(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size
    assert format_bytes(512 << 20) == "512MiB"


@pytest.mark.parametrize(
    "arguments", [("--role", "cook"), ("--dtype", "int3"), ("--block-tokens", "0"), ("--lend", "much")]
)
def test_an_option_that_cannot_work_ends_the_command_with_status_2(arguments: tuple[str, str]) -> None:
    status, output = run_worker(*arguments)
    assert status == 2
    assert "error: ConfigError" in output


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1K", 1000), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29), ("2gb", 2 * 10**9), ("0", 0)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 TiB", "1e9", "12 parsecs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_bytes(text)


def test_a_decode_worker_lends_nothing_unless_told_to() -> None:
    assert WorkerConfig(role="decode").lent_bytes == 0
    assert WorkerConfig(role="prefill").lent_bytes == 1 << 30
    assert WorkerConfig(role="decode", lend_bytes=5).lent_bytes == 5
