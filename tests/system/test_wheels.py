"""A layer and one driver, as wheels in an environment with nothing else, move bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_S, RUN_S = 900, 300
PIP = ("-m", "pip", "--disable-pip-version-check")
DRIVERS = sorted(path.parent.name for path in (ROOT / "drivers").glob("[!_]*/pyproject.toml"))
# Kept as they were compiled for this environment; the others take their time.
COMPILED_ANEW = ("drivers/tcp",)


class Way(NamedTuple):
    """How a driver can move bytes on any machine."""

    options: dict[str, str | int | float | bool]
    source: str = "memory"


def of_tests(path: str) -> ModuleType:
    """A module of a driver's tests."""
    spec = importlib.util.spec_from_file_location(f"double_of_{Path(path).stem}", ROOT / "drivers" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def over_cann(_: Path) -> Way:
    """Over doubles of ACL and HIXL, by the shim that was built against them."""
    module = of_tests("ascend/tests/double/cann.py")
    cann = module.build()
    shim = module.shim_of(cann / "home")
    return Way({"library": str(cann / "lib64" / "libascendcl.so"), "shim": str(shim)})


def over_verbs(folder: Path) -> Way:
    """Over a double of libibverbs."""
    library = of_tests("verbs/tests/double/verbs_double.py").build(folder)
    return Way({"library": str(library), "devices": "double0"})


def over_libfabric(_: Path) -> Way:
    """Over a double of libfabric."""
    library = of_tests("efa/tests/fabric_double.py").double_library()
    return Way({"library": str(library), "domain": "double0"})


def over_cuda(_: Path) -> Way:
    """Over a double of libcuda; main memory, for which it needs a GPU as well."""
    return Way({"library": str(of_tests("nvlink/tests/double/cuda_double.py").build())})


WAYS: dict[str, Callable[[Path], Way] | None] = {
    "ascend": over_cann,
    "cxl": lambda folder: Way(
        {"path": str(folder / "pool"), "create": True, "size_bytes": 64 << 20}, source="pool"
    ),
    "efa": over_libfabric,
    "nixl": None,  # 116 MB to download; its own environment does
    "nvlink": over_cuda,
    "nvmeof": lambda _: Way({}, source="file"),
    "shm": lambda _: Way({}),
    "tcp": lambda _: Way({}),
    "verbs": over_verbs,
}
# What the doctor may say where there is no hardware: what is missing, and what to do.
MISSING = {
    "ascend": "libascendcl.so.*install CANN",
    "cxl": "it has no pool: set driver_options",
    "efa": "no EFA device .* option provider|cannot load libfabric.*; install libfabric 1.17 or newer",
    "nixl": r'NIXL is not installed; pip install "mooncake-driver-nixl\[cu12\]"',
    "nvlink": "libcuda.so.1.*install NVIDIA's driver|shows no GPU; look at nvidia-smi",
    "verbs": "no RDMA.*load the module|install|raise it",
}


def run(*command: str | Path, timeout_s: float = RUN_S, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that knows nothing of this environment."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [*map(str, command)],
        env=plain,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        **more,
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of the transfer layer and of every driver, by distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    build = (sys.executable, ROOT / ".ci" / "wheels.py", "--into", folder)
    as_installed = ["packages/mooncake-transfer", *(f"drivers/{name}" for name in DRIVERS)]
    as_installed = [member for member in as_installed if member not in COMPILED_ANEW]
    for members in (("--as-installed", *as_installed), COMPILED_ANEW):
        built = run(*build, *members, timeout_s=BUILD_S)
        assert built.returncode == 0, built.stderr
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    """Python of an environment that has the transfer layer, what that needs, and no driver."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    installed = run(python, *PIP, "install", wheels["mooncake_transfer"], timeout_s=BUILD_S)
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.fixture
def alone(bare: Path, wheels: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Path]:
    """The same with one driver: the wheel's own file, and nothing that it would have to fetch."""
    name = f"mooncake_driver_{request.param}"
    installed = run(bare, *PIP, "install", "--quiet", "--no-index", wheels[name])
    assert installed.returncode == 0, installed.stderr
    yield bare
    removed = run(bare, *PIP, "uninstall", "--yes", name)
    assert removed.returncode == 0, removed.stderr


def test_every_driver_has_a_row() -> None:
    assert sorted(WAYS) == DRIVERS


@pytest.mark.slow
@pytest.mark.timeout(2 * BUILD_S)
def test_a_layer_without_a_driver_says_what_to_install(wheels: dict[str, Path], bare: Path) -> None:
    pure = {"mooncake_driver_nixl"}
    tagged = {name for name, path in wheels.items() if "manylinux" in path.name and "abi3" in path.name}
    assert tagged == wheels.keys() - pure
    done = run(bare, "-c", "import mooncake_transfer; mooncake_transfer.TransferEngine()")
    assert done.returncode != 0
    assert "pip install mooncake-driver-tcp" in done.stderr
    listed = run(bare, *PIP, "list", "--format=json")
    names = {entry["name"] for entry in json.loads(listed.stdout)}
    assert {name for name in names if name.startswith("mooncake")} == {"mooncake-transfer"}
    assert not names & {"torch", "transformers", "nixl"}


@pytest.mark.slow
@pytest.mark.timeout(2 * BUILD_S)
@pytest.mark.parametrize(
    ("alone", "name"), [(name, name) for name in DRIVERS], indirect=["alone"], ids=DRIVERS
)
def test_a_driver_alone_is_judged_and_moves_bytes(alone: Path, name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    options, source = way(tmp_path) if way else ({}, "")
    program = (ROOT / "tests/system/one_driver.py", name, json.dumps(options), source)
    done = run(alone, *program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == []
    if found["usable"]:
        assert (found["devices"] != [], found["doctor"]) == (True, 0)
    else:
        assert re.search(MISSING[name], found["reason"]), found["reason"]
        assert found["doctor"] == 1
    if way:
        assert found["same"] is True
        assert found["moved"] == {name: 2 << 20}
