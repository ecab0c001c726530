"""Running programs of this machine, and talking to the person who runs the lab."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
QEMU = "qemu-system-x86_64"


class LabError(Exception):
    """Something the lab needs is missing or broke; the text says what."""


def say(text: str) -> None:
    """Write a line for the person; what the command in the guest writes stays apart from it."""
    sys.stderr.write(f"vmlab: {text}\n")
    sys.stderr.flush()


def run(args: list[str], check: bool = True, **options: Any) -> str:
    """Run a program and return what it wrote. Raises LabError with the end of that when it fails."""
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.STDOUT)
    done = subprocess.run(args, text=True, check=False, **options)
    if check and done.returncode:
        raise LabError(f"{' '.join(args)} failed ({done.returncode}):\n{(done.stdout or '')[-2000:]}")
    return done.stdout or ""


def qemu_version() -> tuple[int, int]:
    """Return the installed QEMU's version; (0, 0) when there is none."""
    try:
        found = re.search(r"version (\d+)\.(\d+)", run([QEMU, "--version"]))
    except FileNotFoundError:
        return 0, 0
    return (int(found[1]), int(found[2])) if found else (0, 0)


def stop(process: subprocess.Popen[Any]) -> None:
    """End a program of ours: kindly, then for certain."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
