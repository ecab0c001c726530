"""What all compiled drivers share, in a child that is forked while one of their locks is held."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from loopback import CURRENT, HERE


def test_a_forked_child_begins_with_tables_of_its_own(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler; install g++")
    program = tmp_path / "forks"
    command = [compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{CURRENT}", str(HERE / "forks.cpp")]
    subprocess.run([*command, "-o", str(program), "-lpthread"], check=True, timeout=300)
    assert subprocess.run([str(program)], check=False, timeout=300).returncode == 0
