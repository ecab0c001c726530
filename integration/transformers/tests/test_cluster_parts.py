"""The pure parts of the supervisor, and one child process."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from mooncake_transformers.cluster import ClusterSpec, SpecError
from mooncake_transformers.cluster.argv import conductor_argv, worker_argv
from mooncake_transformers.cluster.last_words import last_words
from mooncake_transformers.cluster.preflight import check_file_can_be_written
from mooncake_transformers.cluster.process import ChildProcess
from mooncake_transformers.cluster.restart import RestartBudget
from mooncake_transformers.cluster.signals import stop_on_signals


@pytest.mark.parametrize(
    "settings",
    [{"prefill_workers": 0}, {"decode_workers": -1}, {"port": 70000}, {"threads": -1}, {"segment_bytes": 0}],
)
def test_a_spec_that_cannot_work_is_refused_with_the_value(settings: dict[str, int]) -> None:
    (value,) = settings.values()
    with pytest.raises(SpecError, match=str(value)):
        ClusterSpec(**settings)  # type: ignore[arg-type]


def test_an_unknown_dtype_is_refused_with_the_choices() -> None:
    with pytest.raises(SpecError, match=r"'float99'; it must be one of float32, bfloat16, float16"):
        ClusterSpec(dtype="float99")


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_file_can_be_written(tmp_path / "ready.json")
    for path, reason in ((tmp_path / "no" / "x", "no folder"), (tmp_path, "it is a folder")):
        with pytest.raises(SpecError, match=reason):
            check_file_can_be_written(path)


def test_the_log_of_a_child_is_read_back_while_it_writes() -> None:
    # Two lines with a look in between: a look must not move the place where the child writes.
    program = "import sys; print('one', flush=True); sys.stdin.read(); input()"
    child = ChildProcess("writer", [sys.executable, "-c", program], None)
    child.spawn()
    try:
        deadline_s = time.monotonic() + 20
        while not (tail := child.log_tail())[-1:] or "EOFError" not in tail[-1]:
            assert time.monotonic() < deadline_s, tail
            time.sleep(0.01)
        assert tail[0] == "one"
    finally:
        child.stop(5)
    assert child.log_tail() == []


def test_each_death_doubles_the_wait_and_too_many_end_it() -> None:
    budget = RestartBudget(max_per_minute=3)
    assert [budget.delay_after_death(now_s) for now_s in (0.0, 1.0, 2.0, 3.0)] == [0.2, 0.4, 0.8, None]


def test_deaths_older_than_a_minute_are_forgiven() -> None:
    budget = RestartBudget(max_per_minute=1)
    assert budget.delay_after_death(0.0) == 0.2
    assert budget.delay_after_death(61.0) == 0.2


def test_a_worker_is_told_all_the_spec_says() -> None:
    spec = ClusterSpec(model="/models/m", dtype="bfloat16", threads=3, drivers=("tcp", "shm"))
    words = worker_argv(spec, "prefill", "127.0.0.1:1", 77)
    pairs = {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}
    assert pairs["--model"] == "/models/m"
    assert pairs["--dtype"] == "bfloat16"
    assert pairs["--threads"] == "3"
    assert pairs["--port"] == "77"
    assert [words[i + 1] for i, word in enumerate(words) if word == "--driver"] == ["tcp", "shm"]


def test_the_conductor_is_told_every_worker() -> None:
    words = conductor_argv(ClusterSpec(), ["http://a", "http://b"], 8000)
    assert [words[i + 1] for i, word in enumerate(words) if word == "--worker"] == ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ([], ""),
        (["2026-01-01 INFO x loaded", ""], "2026-01-01 INFO x loaded"),
        (
            ["Traceback (most recent call last):", "  File", "a.b.MemoryUnavailable: 9 GiB"],
            "a.b.MemoryUnavailable: 9 GiB",
        ),
        (["INFO start", "error: port 80 is taken;", "choose another"], "port 80 is taken; choose another"),
        (["mooncake conductor: port 80 is taken", "2026-01-01 INFO stopped"], "port 80 is taken"),
        (["mooncake store master cannot start: no room"], "no room"),
        (["\x1b[1;31merror:\x1b[0m no such model"], "no such model"),
    ],
)
def test_the_reason_is_found_in_a_log(log: list[str], expected: str) -> None:
    assert last_words(log) == expected


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def test_descriptors_are_closed_after_a_stop(tmp_path: Path) -> None:
    before = open_descriptors()
    child = ChildProcess("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    child.spawn()
    child.stop(5)
    child.stop(5)
    assert child.exit_status == -signal.SIGTERM
    assert open_descriptors() == before


def test_a_program_that_does_not_exist_leaves_no_descriptor(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        ChildProcess("nobody", ["/no/such/program"], tmp_path / "log").spawn()
    assert open_descriptors() == before


def test_a_signal_sets_the_event_and_interrupts_only_where_allowed() -> None:
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.event.is_set()
        with pytest.raises(KeyboardInterrupt), stop.interrupting():
            pytest.fail("a stop that came earlier was not noticed")
    with stop_on_signals() as stop, pytest.raises(KeyboardInterrupt), stop.interrupting():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
