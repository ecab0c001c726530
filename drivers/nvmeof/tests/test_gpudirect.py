"""GPU memory and files by cuFile, over a double of libcufile that enforces its rules; no GPU is needed."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_files import config

from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import DriverUnavailable
from mooncake_transfer.testing.compiling import compiled

HERE = Path(__file__).parent / "gds_double"
DRIVER = HERE.parents[1]
ABI = (DRIVER / "abi", DRIVER.parents[1] / "abi")  # in an sdist, and in the repository

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reports]:
    """Compile the double and start processes that find it."""

    @cache
    def build(*flags: str) -> Path:
        folder = tmp_path_factory.mktemp("gds")
        (abi,) = [each for each in ABI if each.is_dir()]
        command = [*os.environ.get("CXX", "c++").split(), "-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror"]
        command += ["-fPIC", "-shared", "-pthread", "-fvisibility=hidden", *flags, f"-I{DRIVER / 'core'}"]
        command += [f"-I{abi}", str(HERE / "double.cpp"), "-o", str(folder / "libcuda.so.1")]
        subprocess.run(command, check=True)
        (folder / "libcufile.so.0").symlink_to("libcuda.so.1")  # one library, loaded once
        return folder

    def start(*flags: str, **settings: str) -> Reports:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(build(*flags)), **settings}
        command = [sys.executable, str(HERE / "inside_gpudirect.py"), str(tmp_path_factory.mktemp("files"))]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return start


@pytest.fixture(scope="module")
def reports(run: Callable[..., Reports]) -> Reports:
    return run()


def check_moves(reports: Reports, options: dict[str, Any]) -> dict[str, Any]:
    (report,) = [each for each in reports if each.get("moves") == options]
    assert report["aligned"]
    assert report["unaligned"]
    assert report["read"]
    assert report["short"]
    assert report["left"] == {"buffers": 0, "handles": 0, "contexts": 0}
    return report


def test_what_is_aligned_goes_in_batches_from_pinned_memory(reports: Reports) -> None:
    report = check_moves(reports, {})
    assert report["pinned"] == 1
    assert report["batched"] > 0


@pytest.mark.parametrize("options", [{"durable": True}, {"direct": False}])
def test_bytes_are_right_with_other_options(reports: Reports, options: dict[str, Any]) -> None:
    check_moves(reports, options)


def test_errors_name_what_failed_where_and_why(reports: Reports) -> None:
    (said,) = [each["fails"] for each in reports if "fails" in each]
    assert "cannot read 8192 bytes at offset 4096 of" in said["cufile"]
    assert "cuFile error 5010" in said["cufile"]
    assert "Input/output error" in said["eio"]
    assert "the file ends before the region" in said["short"]


def test_gpu_memory_that_cannot_be_used_is_refused_with_the_reason(reports: Reports) -> None:
    (said,) = [each["refused"] for each in reports if "refused" in each]
    assert "GPU 7 cannot be used (CUDA error 101)" in said["device"]
    assert "gpudirect" in said["option"] or "none takes this kind" in said["option"]


def test_the_context_of_the_application_stays_its_own(reports: Reports) -> None:
    (kept,) = [each["contexts"] for each in reports if "contexts" in each]
    assert kept == {"register": True, "write": True, "close": True, "end": True}


def test_a_batch_that_hangs_is_cancelled_and_what_is_lost_is_not_done_twice(reports: Reports) -> None:
    (said,) = [each["disturbed"] for each in reports if "disturbed" in each]
    assert said["hanging"].startswith("TransferTimeout")
    assert said["hanging_s"] < 10
    assert said["hanging_cancels"] > 0
    assert "cuFileBatchIOGetStatus: cuFile error 5030" in said["lost"]
    assert said["lost_cancels"] > 0
    assert max(said["hanging_again"], said["lost_again"]) <= 1, "only what was alone at the beginning"
    assert said["after"]


def test_without_a_thread_operations_fail_with_the_reason(run: Callable[..., Reports]) -> None:
    preloaded = compiled("no_threads.so", [HERE.parent / "no_threads.cpp"], "-O1", "-shared", "-ldl")
    (said,) = [each["scarce"] for each in run(LD_PRELOAD=str(preloaded)) if "scarce" in each]
    assert "no thread can be had" in said


def test_no_rule_of_cufile_was_broken(reports: Reports) -> None:
    assert reports[-1] == {"violations": ""}


def test_an_older_cufile_without_batches_and_a_small_window_do(run: Callable[..., Reports]) -> None:
    reports = run("-DGDS_DOUBLE_WITHOUT_BATCHES", GDS_DOUBLE_NO_WINDOW="1")
    report = check_moves(reports, {})
    assert (report["pinned"], report["batched"]) == (0, 0)
    assert reports[-1] == {"violations": ""}


def test_a_missing_kernel_module_is_told(run: Callable[..., Reports]) -> None:
    ((said,),) = [each.values() for each in run(GDS_DOUBLE_NO_MODULE="1")]
    assert "nvidia-fs is not loaded" in said


def test_a_machine_without_a_gpu_is_told_what_is_missing() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(DriverUnavailable, match=r"libcuda\.so\.1.*or leave the option gpudirect off"):
            TransferEngine(config(gpudirect=True))
    else:
        pytest.skip("this machine has libcuda")
