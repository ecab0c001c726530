"""What is said of the core in C++: the programs of tests/native, over the double of libibverbs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake_transfer.testing.compiling import compiled

HERE = Path(__file__).parent
CORE = HERE.parent / "core"
ABI = next(path for path in (HERE.parent / "abi", HERE.parents[2] / "abi") if path.is_dir())
# Building them takes its time on a busy machine.
pytestmark = pytest.mark.timeout(600)
CHECKS = (
    "gid", "wire", "notices", "behind", "back_pressure", "failed_notice", "cancelled_before_notice",
    "fence", "fence_deadline", "revoke_deadline", "chunks", "dmabuf", "attributes", "sweep",
    "parallel_registration", "shared_registration", "steady_importer", "no_descriptor", "tags",
    "most_queue_pairs", "pace", "adaptive_slices",
)  # fmt: skip
OPERATIONS = 1 << 20
DEADLINE_S = 60


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """Builds a program of ``native/``, with the core."""
    core = [path for path in sorted(CORE.glob("*.cpp")) if path.name != "bind.cpp"]

    def build(source: Path) -> Path:
        include = (CORE, ABI, HERE / "double")
        return compiled(f"{source.stem}.o", [source], "-O2", "-c", include=include)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(build, core))
    return lambda name: compiled(name, [], "-ldl", link=[*objects, build(HERE / f"native/{name}.cpp")])


@pytest.mark.parametrize("name", CHECKS)
def test_check_holds(program: Callable[[str], Path], double: Path, name: str) -> None:
    command = [str(program("checks")), str(double), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


def test_the_hot_path_allocates_nothing_and_rings_once_for_32(
    program: Callable[[str], Path], double: Path
) -> None:
    """A million small writes in batches of 1,024: 32 to a doorbell, one of 16 signalled, all inline."""
    command = [str(program("hot_path")), str(double), "0", str(OPERATIONS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    counted = json.loads(done.stdout)
    assert counted["operations"] == counted["requests"] == counted["inline"] == OPERATIONS
    assert counted["allocations"] == 0
    assert counted["doorbells"] == OPERATIONS // 32
    assert counted["signalled"] == OPERATIONS // 16
