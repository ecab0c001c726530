"""Reinstall the editable members whose built form is older than what it was built from.

An editable install picks up Python sources at once, but not C++ sources, the driver ABI header or what
pyproject.toml says (dependencies, entry points). `hatch run` does not notice either, so the scripts that run
the code call this first. pip writes a member's RECORD last, so its time is the time of the last install; git
gives a file it changes the time of the checkout. Give --all to reinstall every member.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def members() -> list[Path]:
    """Return the folders of this workspace that the running environment has installed in editable form."""
    candidates = (*ROOT.glob("packages/*"), *ROOT.glob("drivers/*"), *ROOT.glob("integration/*"))
    return sorted(folder for folder in candidates if installed_at(folder) is not None)


def installed_at(folder: Path) -> float | None:
    """Return when this member was last installed, in seconds since 1970, or None when it is not installed."""
    project = folder / "pyproject.toml"
    name = re.search(r'^name = "(.+)"$', project.read_text(), re.MULTILINE) if project.is_file() else None
    if name is None:
        return None
    try:
        distribution = importlib.metadata.distribution(name[1])
    except importlib.metadata.PackageNotFoundError:
        return None
    record = next((file for file in distribution.files or () if file.name == "RECORD"), None)
    return None if record is None else Path(str(record.locate())).stat().st_mtime


def changed_at(folder: Path) -> float:
    """Return when anything that an install of this member turns into something else was last changed."""
    inputs = [folder / "pyproject.toml"]
    if (folder / "CMakeLists.txt").is_file():
        inputs += [folder / "CMakeLists.txt", *folder.glob("core/**/*"), *ROOT.glob("abi/**/*")]
    return max(file.stat().st_mtime for file in inputs if file.is_file())


def main() -> int:
    """Install what is stale in one go; return pip's exit code."""
    everything = "--all" in sys.argv[1:]
    stale = [folder for folder in members() if everything or changed_at(folder) > (installed_at(folder) or 0)]
    if not stale:
        return 0
    names = ", ".join(str(folder.relative_to(ROOT)) for folder in stale)
    sys.stderr.write(f"rebuilding {names}\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet"]
    if importlib.util.find_spec("scikit_build_core") is not None:
        # The environment has what builds them; using it keeps CMake's cache warm.
        command.append("--no-build-isolation")
    for folder in stale:
        command += ["--editable", str(folder)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
