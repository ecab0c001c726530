"""The supervisor against a stand-in for the ``mooncake`` program, which starts in a tenth of a second."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mooncake_transfer.listening import listen
from mooncake_transformers.cluster import (
    Cluster,
    ClusterSpec,
    ClusterStopped,
    PortTaken,
    ProcessDied,
    ProcessNotReady,
    Progress,
    SpecError,
    argv,
    preflight,
)

FAKE = (sys.executable, str(Path(__file__).with_name("fake_mooncake.py")))


@pytest.fixture(autouse=True)
def fake_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argv, "MOONCAKE", FAKE)


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    assert [child.cmdline() for child in psutil.Process().children(recursive=True)] == []


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def test_parts_start_in_order_and_stop_in_reverse() -> None:
    steps: list[Progress] = []
    with Cluster(ClusterSpec(decode_workers=2), on_progress=steps.append) as cluster:
        assert cluster.url.startswith("http://127.0.0.1:")
        ready = [step.part for step in steps if step.state == "ready"]
        assert ready[0] == "store"
        assert sorted(ready[1:4]) == ["decode-0", "decode-1", "prefill-0"]
        assert ready[4] == "conductor"
    stopped = [step.part for step in steps if step.state == "stopped"]
    assert stopped[0] == "conductor"
    assert stopped[-1] == "store"


def test_workers_are_told_the_store_and_the_conductor_the_workers() -> None:
    with Cluster(ClusterSpec()) as cluster:
        worker = cluster.part("prefill-0").child.argv
        assert worker[worker.index("--store") + 1] == cluster.part("store").endpoint
        conductor = cluster.part("conductor").child.argv
        told = {conductor[i + 1] for i, word in enumerate(conductor) if word == "--worker"}
        assert told == {cluster.part("prefill-0").endpoint, cluster.part("decode-0").endpoint}


@pytest.mark.parametrize("name", ["store", "prefill-0", "decode-0", "conductor"])
def test_a_killed_process_comes_back_where_it_was(name: str) -> None:
    with Cluster(ClusterSpec()) as cluster:
        part = cluster.part(name)
        endpoint, pid = part.endpoint, part.child.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: part.child.pid != pid and part.is_ready, f"{name} is ready again")
        assert part.endpoint == endpoint
        assert cluster.failure is None


def test_a_worker_that_keeps_dying_fails_the_cluster() -> None:
    with Cluster(ClusterSpec(model="doomed", max_restarts_per_minute=2)) as cluster:
        wait_until(lambda: cluster.failure is not None, "the cluster gives up")
        assert isinstance(cluster.failure, ProcessDied)
        assert "ModelFailed: as was to be expected" in str(cluster.failure)
        with pytest.raises(ProcessDied):
            cluster.wait(threading.Event())


def test_without_restart_the_first_death_fails_the_cluster() -> None:
    with Cluster(ClusterSpec(restart=False)) as cluster:
        os.kill(cluster.part("prefill-0").child.pid, signal.SIGKILL)
        wait_until(lambda: cluster.failure is not None, "the cluster gives up")
        assert "killed by SIGKILL" in str(cluster.failure)


def test_a_child_that_dies_while_starting_is_quoted_in_one_line() -> None:
    with pytest.raises(
        ProcessDied, match=r"UnknownModel: there is no folder 'missing' \(exit status 1\)"
    ) as caught:
        Cluster(ClusterSpec(model="missing")).start()
    assert "\n" not in str(caught.value)


def test_a_child_that_is_never_ready_is_stopped_at_the_deadline() -> None:
    with pytest.raises(ProcessNotReady, match="not ready after 1 s"):
        Cluster(ClusterSpec(model="slow", start_timeout_s=1)).start()


def test_a_stop_while_starting_leaves_nothing() -> None:
    stop = threading.Event()

    def stop_when_a_worker_starts(progress: Progress) -> None:
        if progress.part == "decode-0" and progress.state == "starting":
            stop.set()

    with pytest.raises(ClusterStopped):
        Cluster(ClusterSpec(model="slow"), on_progress=stop_when_a_worker_starts, stop=stop).start()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_time() -> None:
    with Cluster(ClusterSpec(model="stubborn", stop_timeout_s=0.2)) as cluster:
        pids = [part.child.pid for part in cluster.parts]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    steps: list[Progress] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port}: .*--port"):
            Cluster(ClusterSpec(port=port), on_progress=steps.append).start()
    assert steps == []


def test_an_ipv6_port_is_looked_at_where_the_gateway_would_listen() -> None:
    with listen("::1", 0) as taken:
        port = taken.getsockname()[1]
        preflight.check_port_is_free("127.0.0.1", port)
        with pytest.raises(PortTaken, match=rf"cannot listen on \[::1\]:{port}: .*--port"):
            preflight.check_port_is_free("::1", port)
    preflight.check_port_is_free("::1", port)


def test_the_interface_of_a_link_local_address_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    monkeypatch.setattr(socket.socket, "bind", lambda _, where: bound.append(where))
    preflight.check_port_is_free("fe80::1%lo", 7000)
    assert bound == [("fe80::1", 7000, 0, socket.if_nametoindex("lo"))]


def test_logs_that_nobody_asked_for_have_no_file_that_could_be_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Cluster(ClusterSpec()) as cluster:
        children = [part.child for part in cluster.parts]
        wait_until(lambda: all(child.log_tail() for child in children), "every child has logged something")
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_more_memory_than_there_is_is_refused_with_the_numbers_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[Progress] = []
    spec = ClusterSpec(segment_bytes=6 << 30, pool_bytes=1 << 30)
    monkeypatch.setattr(preflight, "available_bytes", lambda: 14 << 30)
    preflight.check_memory(spec)
    monkeypatch.setattr(preflight, "available_bytes", lambda: (14 << 30) - 1)
    with pytest.raises(
        SpecError, match=rf"2 workers .* 6GiB .* 1GiB .* {14 << 30} bytes .* {(14 << 30) - 1} "
    ):
        Cluster(spec, on_progress=steps.append).start()
    assert steps == []


def test_an_address_the_machine_does_not_have_is_named_as_that() -> None:
    with pytest.raises(SpecError, match=r"this machine does not have the address 203\.0\.113\.5") as refused:
        Cluster(ClusterSpec(host="203.0.113.5")).start()
    assert "stop what listens there" not in str(refused.value)


def test_log_files_stay_in_a_folder_that_was_asked_for(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with Cluster(ClusterSpec(), log_folder=logs):
        pass
    assert {path.name for path in logs.iterdir()} == {
        "store.log", "prefill-0.log", "decode-0.log", "conductor.log"
    }  # fmt: skip


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "supervise.py"
    program.write_text(
        "import sys, threading\n"
        "from mooncake_transformers.cluster import Cluster, ClusterSpec, argv\n"
        f"argv.MOONCAKE = {FAKE!r}\n"
        "with Cluster(ClusterSpec()) as cluster:\n"
        "    print(*[part.child.pid for part in cluster.parts], flush=True)\n"
        "    threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        assert len(pids) == 4
        supervisor.kill()
    wait_until(lambda: not any(map(is_running, pids)), "the children have ended")


def is_running(pid: int) -> bool:
    # Nobody may be there to reap an orphan: a zombie has ended.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
