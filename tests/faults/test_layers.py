"""`hatch run faults` runs every test of faults there is."""

from __future__ import annotations

import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_every_file_of_faults_belongs_to_a_layer_and_every_pattern_names_files() -> None:
    command = runpy.run_path(str(HERE / "__main__.py"))
    named = {file for layer in command["LAYERS"] for file in command["files_of"](layer)}
    here = {f"tests/faults/{path.name}" for path in HERE.glob("test_*.py")} - {"tests/faults/test_layers.py"}
    assert here <= named
