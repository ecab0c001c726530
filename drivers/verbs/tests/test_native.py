"""What is said of the core in C++: the programs of tests/native, over the double of libibverbs."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parent / "core"
ABI = next(path for path in (HERE.parent / "abi", HERE.parents[2] / "abi") if path.is_dir())
# Building them takes its time on a busy machine.
pytestmark = pytest.mark.timeout(600)
CHECKS = (
    "gid", "wire", "notices", "behind", "back_pressure", "failed_notice", "cancelled_before_notice",
    "fence", "fence_deadline", "revoke_deadline", "chunks", "dmabuf", "attributes", "sweep",
    "parallel_registration",
)  # fmt: skip
OPERATIONS = 1 << 20
DEADLINE_S = 60


@pytest.fixture(scope="session")
def programs(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with ``checks`` and ``hot_path``, built."""
    folder = tmp_path_factory.mktemp("native")
    flags = [*compiler, f"-I{ABI}", f"-I{HERE / 'double'}"]
    core = [path for path in sorted(CORE.glob("*.cpp")) if path.name != "bind.cpp"]
    sources = [*core, HERE / "native/checks.cpp", HERE / "native/hot_path.cpp"]

    def build(source: Path) -> str:
        made = folder / f"{source.stem}.o"
        subprocess.run([*flags, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        *objects, checks, hot_path = pool.map(build, sources)
    for main in (checks, hot_path):
        subprocess.run([*flags, *objects, main, "-o", main.removesuffix(".o"), "-ldl"], check=True)
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_check_holds(programs: Path, double: Path, name: str) -> None:
    command = [str(programs / "checks"), str(double), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


def test_the_hot_path_allocates_nothing_and_rings_once_for_32(programs: Path, double: Path) -> None:
    """A million small writes in batches of 1,024: 32 to a doorbell, one of 16 signalled, all inline."""
    command = [str(programs / "hot_path"), str(double), "0", str(OPERATIONS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    counted = json.loads(done.stdout)
    assert counted["operations"] == counted["requests"] == counted["inline"] == OPERATIONS
    assert counted["allocations"] == 0
    assert counted["doorbells"] == OPERATIONS // 32
    assert counted["signalled"] == OPERATIONS // 16
