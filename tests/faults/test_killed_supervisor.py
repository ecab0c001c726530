"""The program that started everything ends, in every way it can: nothing stays behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from mooncake_transformers.cluster.testing import MOONCAKE, Gateway, ServedCluster, wait_until

pytestmark = pytest.mark.slow


def test_kill_9_of_serve_takes_every_process_with_it(model_folder: Path, tmp_path: Path) -> None:
    with ServedCluster(model_folder, tmp_path, "--threads", "1") as served:
        assert Gateway(served.url, "tiny-chat").works()
        assert len(served.family()) == 4
        served.kill()
        served.check_nothing_is_left(timeout_s=30)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_while_starting_leaves_nothing(
    model_folder: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    served = ServedCluster(model_folder, tmp_path)
    served.spawn()
    wait_until(lambda: "prefill-0" in served.log(), "the workers are being started", 60)
    status = served.end_with(signum)
    served.check_nothing_is_left()
    assert status == (-signal.SIGKILL if signum == signal.SIGKILL else 130), served.log()


def test_ctrl_c_in_the_middle_of_the_demo_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "demo.log"
    argv = [*MOONCAKE, "demo", "--model", str(model_folder), "--threads", "1"]
    with open(output, "wb") as log:
        demo = psutil.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "2/9" in output.read_text() or demo.poll() is not None, "it talks", 100)
        assert demo.poll() is None, output.read_text()
        children = demo.children(recursive=True)
        assert len(children) == 4
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 130, output.read_text()
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.wait(10)
    assert [child for child in children if child.is_running()] == []


def test_a_temporary_folder_that_is_left_would_be_found(model_folder: Path, tmp_path: Path) -> None:
    served = ServedCluster(model_folder, tmp_path)
    served.spawn()
    # What an end by SIGKILL gives nobody a chance to remove.
    (tmp_path / "temporary" / "mooncake-left").mkdir()
    served.kill()
    with pytest.raises(AssertionError, match="mooncake-left"):
        served.check_nothing_is_left()
