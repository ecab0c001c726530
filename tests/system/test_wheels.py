"""A layer and one driver, as wheels in an environment with nothing else, move bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_S, RUN_S = 900, 120

MOVE = """
import json
from mooncake_transfer import TransferEngine

with TransferEngine() as owner, TransferEngine() as user:
    theirs, ours = owner.allocate(1 << 20), user.allocate(1 << 20)
    theirs.view()[:] = b"\\x5a" * (1 << 20)
    user.read(ours, user.import_region(theirs.descriptor()), [[0, 0, 1 << 20]]).wait(timeout_s=30)
    print(json.dumps({"same": ours.view() == theirs.view(), "drivers": sorted(user.drivers)}))
"""


def run(*command: str | Path, timeout_s: float = RUN_S) -> subprocess.CompletedProcess[str]:
    """Run a program that knows nothing of this environment."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [*map(str, command)], env=plain, capture_output=True, text=True, check=False, timeout=timeout_s
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of the transfer layer and the tcp driver, by distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    members = ("packages/mooncake-transfer", "drivers/tcp")
    built = run(sys.executable, ROOT / ".ci" / "wheels.py", "--into", folder, *members, timeout_s=BUILD_S)
    assert built.returncode == 0, built.stderr
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    """The programs' folder of an environment that has the transfer layer, what that needs, and no driver."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=True)
    pip = (home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    installed = run(*pip, wheels["mooncake_transfer"], timeout_s=BUILD_S)
    assert installed.returncode == 0, installed.stderr
    return home / "bin"


@pytest.mark.slow
@pytest.mark.timeout(2 * BUILD_S)
def test_one_layer_and_one_driver_move_bytes_with_nothing_else_installed(
    wheels: dict[str, Path], bare: Path
) -> None:
    assert all("manylinux" in path.name and "abi3" in path.name for path in wheels.values()), wheels

    alone = run(bare / "python", "-c", MOVE)
    assert alone.returncode != 0
    assert "pip install mooncake-driver-tcp" in alone.stderr, "without a driver it says what to install"

    pip = (bare / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check")
    installed = run(*pip, wheels["mooncake_driver_tcp"])
    assert installed.returncode == 0, installed.stderr
    moved = run(bare / "python", "-c", MOVE)
    assert moved.returncode == 0, moved.stderr
    assert json.loads(moved.stdout) == {"same": True, "drivers": ["tcp"]}

    doctor = run(bare / "mooncake", "doctor", "--json")
    assert doctor.returncode == 0, doctor.stderr
    listed = run(bare / "python", "-m", "pip", "list", "--format=json", "--disable-pip-version-check")
    names = {entry["name"] for entry in json.loads(listed.stdout)}
    assert {name for name in names if name.startswith("mooncake")} == {
        "mooncake-transfer",
        "mooncake-driver-tcp",
    }
    assert not names & {"torch", "transformers", "nixl"}
