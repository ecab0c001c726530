"""Start a driver from the template: ``hatch run new-driver NAME [--into FOLDER]``.

The result is a distribution of its own that builds with a plain ``pip install``, anywhere: outside this
repository it gets a copy of `abi/`: the header of the driver ABI, and what drivers share. It moves bytes from
the first minute; its README says what to replace.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path

DRIVERS = Path(__file__).resolve().parent
TEMPLATE = DRIVERS / "_template"
ABI = DRIVERS.parent / "abi"
NAME = re.compile(r"[a-z][a-z0-9]{0,30}")
# What building and testing leaves in the template's folder.
LEFTOVERS = shutil.ignore_patterns("build", "dist", "__pycache__", ".*", "*.so", "*.egg-info")
# The table that only a driver within the repository needs: it takes abi/ from there.
SHARED_ABI = '[tool.hatch.build.targets.sdist.force-include]\n"../../abi" = "abi"\n\n'
IGNORED = "__pycache__/\nbuild/\ndist/\n*.so\n"


class CannotStart(Exception):
    """The name or the folder will not do; the message says why."""


def check_name(name: str) -> None:
    """Raise CannotStart when no new driver can have this name."""
    if not NAME.fullmatch(name):
        raise CannotStart(
            f"{name!r} cannot be a driver's name: use lower-case letters and digits, a letter first"
        )
    installed = {entry.name for entry in entry_points(group="mooncake_transfer.drivers")}
    if name == "template" or name in installed or (DRIVERS / name).exists():
        raise CannotStart(f"there is a driver named {name!r} already; choose another name")


def create(name: str, folder: Path) -> None:
    """Copy the template, renamed, to a new or empty folder (an absolute path). Raises CannotStart."""
    check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CannotStart(f"{folder} is not empty; try --into {folder / f'mooncake-driver-{name}'}")
    shutil.copytree(TEMPLATE, folder, ignore=LEFTOVERS, dirs_exist_ok=True)
    # Children first: a folder is renamed when everything in it has been.
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.write_text(renamed(path.read_text(), name))
        path.rename(path.with_name(renamed(path.name, name)))
    if folder.parent != DRIVERS:
        stand_alone(folder)


def renamed(text: str, name: str) -> str:
    """Put the driver's name in the place of the template's."""
    return text.replace("template", name).replace("Template", name.capitalize())


def stand_alone(folder: Path) -> None:
    """Give a driver outside this repository what it would find here: abi/, and what git ignores."""
    shutil.copytree(ABI, folder / "abi", ignore=LEFTOVERS)
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace(SHARED_ABI, ""))
    (folder / ".gitignore").write_text(IGNORED)


def main(arguments: list[str] | None = None) -> int:
    """Create the driver and say what to do next; 2 when it cannot be created."""
    parser = argparse.ArgumentParser(prog="new-driver", description="Start a driver from the template.")
    parser.add_argument("name", help="lower-case letters and digits, such as the fabric's name")
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="new or empty folder for it (default: drivers/NAME)"
    )
    parsed = parser.parse_args(arguments)
    folder: Path = (parsed.into or DRIVERS / parsed.name).resolve()
    try:
        create(parsed.name, folder)
    except (CannotStart, OSError) as error:
        sys.stderr.write(f"new-driver: {error}\n")
        return 2
    quoted = shlex.quote(str(folder))
    sys.stdout.write(
        f"driver {parsed.name!r} is in {folder}\n\n"
        f"next, from the root of the repository:\n"
        f"  hatch run pip install -e {quoted}\n"
        f"  hatch run pytest {quoted}/tests\n"
        f"  hatch run mooncake doctor\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
