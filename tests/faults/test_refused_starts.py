"""What cannot be started is refused with one clear line, status 2, and nothing left running."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mooncake_transfer.memory import available_bytes
from mooncake_transformers.cluster import ClusterSpec
from mooncake_transformers.cluster.testing import run_mooncake

CANNOT_START = 2
DEFAULT_POOL_BYTES = ClusterSpec().pool_bytes


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def refusal(*arguments: str) -> str:
    done = run_mooncake(*arguments)
    assert done.returncode == CANNOT_START, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_taken_port_is_named_and_nothing_is_started(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        done = run_mooncake("serve", "--model", str(model_folder), "--port", port)
    assert done.returncode == CANNOT_START
    assert port in done.stderr
    assert "--port" in done.stderr
    assert "starting" not in done.stdout


@pytest.mark.slow
def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-model")
    line = refusal("serve", "--port", "0", "--model", missing)
    assert missing in line


def test_a_segment_larger_than_the_machine_is_refused_with_its_size(model_folder: Path) -> None:
    line = refusal("serve", "--port", "0", "--model", str(model_folder), "--segment", "4000000GiB")
    assert str(4_000_000 << 30) in line.replace(",", "") or "GiB" in line
    assert "memory" in line.lower()


def test_segments_that_fit_one_by_one_and_not_together_are_refused_before_anything_starts(
    model_folder: Path,
) -> None:
    # Prefill and decode worker lend one each: 120 % of what is there.
    segment = available_bytes() * 6 // 10
    done = run_mooncake("serve", "--port", "0", "--model", str(model_folder), "--segment", str(segment))
    assert done.returncode == CANNOT_START, done.stdout + done.stderr
    assert str(2 * (segment + DEFAULT_POOL_BYTES)) in done.stderr
    assert "2 workers" in done.stderr
    assert "starting" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--segment", "1", "hold no KV block"),
        ("--block-tokens", "10000", "longer than the model's context of 8192"),
        ("--device", "cuda:99", "'cuda:99' is not there"),
    ],
)
def test_what_only_a_worker_can_know_is_refused_with_its_reason(
    model_folder: Path, option: str, value: str, reason: str
) -> None:
    line = refusal("serve", "--port", "0", "--model", str(model_folder), option, value)
    assert reason in line


def test_a_ready_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    file = str(tmp_path / "no-such-folder" / "ready.json")
    assert file in refusal("serve", "--json-ready", file)


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    file = str(tmp_path / "no-such-folder" / "report.json")
    assert file in refusal("demo", "--json", file)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--prefill", "0"),
        ("--segment", "much"),
        ("--port", "70000"),
        ("--threads", "-1"),
        ("--dtype", "float99"),
        ("--host", "203.0.113.5"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_its_value(option: str, value: str) -> None:
    assert value in refusal("serve", option, value)
