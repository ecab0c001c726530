"""The programs we are measured against, each in an environment of its own, made with pip."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = ROOT / ".hatch" / "peers"
INSTALL_LIMIT_S = 900
SYSTEM_LIBRARIES = "apt-get install libibverbs1 libnuma1 librdmacm1"


class PeerMissing(Exception):
    """A peer cannot be installed here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment with pinned packages; ``installs`` are argument lists of ``pip install``."""

    folder: str
    installs: tuple[tuple[str, ...], ...]
    pinned: tuple[tuple[str, str], ...]
    remedy: str = ""

    @property
    def versions(self) -> str:
        """Distribution and version, for people."""
        return ", ".join(f"{name} {version}" for name, version in self.pinned)


UPSTREAM = Environment(
    "mc",
    (("numpy", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),),
    (("mooncake-transfer-engine-non-cuda", "0.3.13.post1"),),
    remedy=f"it needs system libraries: {SYSTEM_LIBRARIES}",
)
NIXL = Environment(
    "nx",
    # Without its dependencies, which would bring CUDA.
    (("torch==2.13.0", "numpy"), ("--no-deps", "nixl_cu12==1.5.1")),
    (("nixl-cu12", "1.5.1"), ("torch", "2.13.0")),
)
REDIS = Environment("rd", (("redis==8.1.0", "hiredis==3.5.0"),), (("redis", "8.1.0"), ("hiredis", "3.5.0")))
ENVIRONMENTS = {"upstream": UPSTREAM, "nixl": NIXL, "redis": REDIS}

LIST_VERSIONS = "import sys, importlib.metadata as m; print([m.version(name) for name in sys.argv[1:]])"


def python_of(environment: Environment, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made when it is not there. Raises PeerMissing."""
    home = folder / environment.folder
    python = home / "bin" / "python"
    if not _has_pinned(python, environment):
        _install(environment, home, python)
    if not _has_pinned(python, environment):
        raise PeerMissing(f"{environment.versions}: pip installed another version into {home}; remove it")
    return python


def _has_pinned(python: Path, environment: Environment) -> bool:
    if not python.exists():
        return False
    names = [name for name, _ in environment.pinned]
    found = subprocess.run([python, "-c", LIST_VERSIONS, *names], capture_output=True, text=True, timeout=60)
    # A local part, as in 2.13.0+cpu, is the same release.
    versions = [version for _, version in environment.pinned]
    listed = found.stdout.strip().strip("[]").replace("'", "").split(", ")
    return [version.split("+")[0] for version in listed] == versions


def _install(environment: Environment, home: Path, python: Path) -> None:
    steps = [[sys.executable, "-m", "venv", "--clear", str(home)]]
    for arguments in environment.installs:
        steps.append([str(python), "-m", "pip", "install", "--quiet", *arguments])
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise PeerMissing(f"{environment.versions}: not installed within {INSTALL_LIMIT_S} s") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason"]
            raise PeerMissing(f"{environment.versions} cannot be installed: {lines[-1]}")


def library_of(name: str, folder: Path) -> Path:
    """Build ``agents/<name>.cpp`` for this processor. Raises PeerMissing when there is no compiler."""
    source = Path(__file__).with_name("agents") / f"{name}.cpp"
    library = folder / f"{name}.so"
    if library.exists() and library.stat().st_mtime > source.stat().st_mtime:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    command = ["c++", "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    try:
        subprocess.run([*command, "-o", library, source], check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerMissing(f"{source.name} cannot be compiled: {error}") from error
    return library
