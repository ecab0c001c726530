"""Running commands in the lab's guests, or the exact reason why this machine cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
QEMU = "qemu-system-x86_64"
BOOT_AND_RUN_S = 900  # emulated, on a machine with other work: a script imports for three minutes
NEEDS = {"--rdma": "rdma", "--nvmet": "nvme", "--nvme-connect": "nvme", "--cxl": "cxl"}

# What the hardware has a hand in, and how many tests that is, in one process and between two.
SUITE = {
    "bytes, refusals and keys": (
        (
            "blocks_at_unaligned_offsets",
            "a_closed_region_is_refused",
            "a_revoked_key_is_refused",
            "revoking_a_key",
        ),
        10,
    ),
    "cancellations and fences": (
        ("a_cancelled_transfer_lets_go", "a_cancelled_write_lands", "a_stopped_peer_lands"),
        7,
    ),
    "the end of a peer, and notices": (
        ("the_death_of_a_peer", "a_notice_comes_after", "every_notice_comes_once", "a_peer_that_has_died"),
        7,
    ),
}


def kernel_cache() -> Path:
    """Where `hatch run lab --setup` keeps the kernel; run.py reads the same variable."""
    return Path(os.environ.get("MOONCAKE_LAB_CACHE") or HERE.parents[1] / ".hatch/lab")


def why_not() -> str:
    """Why no guest can be booted here; empty when one can."""
    if not shutil.which(QEMU):
        return f"{QEMU} is not installed; run `hatch run lab --setup` first"
    if not (kernel_cache() / "kernel/kernel.json").exists():
        return f"no guest kernel under {kernel_cache()}; run `hatch run lab --setup` first"
    return ""


def set_up_with() -> set[str]:
    """What the lab was set up with; less than everything after `--setup --with ...`."""
    known = kernel_cache() / "groups"
    return set(known.read_text().split()) if known.exists() else set()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let whoever has set up the lab, such as its CI job, rule out that its tests are skipped."""
    parser.addoption(
        "--require-lab", action="store_true", help="fail where a test of the lab would be skipped"
    )


def must_run(config: pytest.Config) -> bool:
    """Whether it is an error that no guest can be booted: it was asked for, or CI has set the lab up."""
    was_set_up = (kernel_cache() / "kernel/kernel.json").exists()
    in_ci = os.environ.get("CI") == "true"
    return bool(config.getoption("--require-lab", default=False)) or (in_ci and was_set_up)


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a guest: ``lab(flags, command)``. Asserts that it ended well."""
    if reason := why_not():
        if must_run(pytestconfig):
            pytest.fail(f"the lab was set up, and cannot be used: {reason}")
        pytest.skip(reason)

    def run(flags: list[str], command: list[str]) -> subprocess.CompletedProcess[str]:
        if lacking := {NEEDS[flag] for flag in flags if flag in NEEDS} - set_up_with():
            reason = f"the lab was set up without {', '.join(sorted(lacking))}"
            if pytestconfig.getoption("--require-lab", default=False):
                pytest.fail(reason)
            pytest.skip(f"{reason}; run `hatch run lab --setup`, which sets up all")
        line = [
            sys.executable,
            str(HERE / "run.py"),
            "--timeout",
            str(BOOT_AND_RUN_S),
            *flags,
            "--",
            *command,
        ]
        limit_s = BOOT_AND_RUN_S + 60
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=limit_s)
        sys.stderr.write(done.stderr)
        assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stderr[-4000:]}"
        return done

    return run


@pytest.fixture(params=SUITE)
def run_suite(
    lab: Callable[..., subprocess.CompletedProcess[str]], request: pytest.FixtureRequest
) -> Callable[[list[str], Path], None]:
    """Runs a part of the suite of all drivers by pytest in a guest: ``run_suite(flags, file)``.

    All of its tests have to pass, and none may be missing or skipped.
    """
    names, count = SUITE[request.param]

    def run(flags: list[str], file: Path) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        done = lab(flags, [*command, "-k", " or ".join(names), str(file)])
        (told,) = re.findall(r"^=*\s*(\d+ passed.*?) in ", done.stdout, re.MULTILINE)
        assert re.fullmatch(rf"{count} passed, \d+ deselected", told), done.stdout

    return run
