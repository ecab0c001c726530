"""The verbs driver's own cost: on a device that completes at once and moves nothing, on one core."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import nics
import rows
import typer
from rich.console import Console

__all__ = ["verbs"]

ROOT = Path(__file__).resolve().parents[3]
DRIVER = ROOT / "drivers/verbs"
TARGET_OPERATIONS = 10e6
COUNTED = (1 << 20, 1 << 21)
BUILD_S, RUN_S = 600, 300
MTU, HEADERS = 4096, 82  # RoCEv2 over IPv4 with preamble, gap and check sum


def build(folder: Path) -> tuple[Path, Path]:
    """Compile the double of libibverbs and the program that drives the core."""
    compiler = [*(os.environ.get("CXX") or "c++").split(), "-std=c++20", "-O2", "-pthread"]
    includes = [f"-I{DRIVER / 'core'}", f"-I{ROOT / 'abi'}", f"-I{DRIVER / 'tests/double'}"]
    library, program = folder / "libibverbs_double.so", folder / "hot_path"
    double = sorted((DRIVER / "tests/double").glob("*.cpp"))
    core = [path for path in sorted((DRIVER / "core").glob("*.cpp")) if path.name != "bind.cpp"]
    shared = ["-fPIC", "-shared", "-fvisibility=hidden", "-o", str(library)]
    subprocess.run([*compiler, *includes, *shared, *map(str, double), "-ldl"], check=True, timeout=BUILD_S)
    sources = [str(path) for path in [*core, DRIVER / "tests/native/hot_path.cpp"]]
    subprocess.run([*compiler, *includes, "-o", str(program), *sources, "-ldl"], check=True, timeout=BUILD_S)
    return library, program


def instructions(program: Path, library: Path) -> tuple[float, float] | None:
    """Instructions of one operation, by callgrind: in all, and in the null device; None without callgrind."""
    if not all(map(shutil.which, ("valgrind", "callgrind_annotate"))):
        return None
    fewer, more = (count_instructions(program, library, operations) for operations in COUNTED)
    in_all, in_device = ((b - a) / (COUNTED[1] - COUNTED[0]) for a, b in zip(fewer, more, strict=True))
    return in_all, in_device


def count_instructions(program: Path, library: Path, operations: int) -> tuple[int, int]:
    """Of a whole run: in all, and those within the library."""
    profile = program.with_name("profile")
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}", str(program)]
    command += [str(library), "0", str(operations)]
    subprocess.run(command, capture_output=True, check=True, timeout=RUN_S)
    listed = ["callgrind_annotate", "--threshold=100", "--auto=no", str(profile)]
    done = subprocess.run(listed, capture_output=True, text=True, check=True, timeout=RUN_S)
    # "1,234 (5.67%)  file:function [object]"
    lines = re.findall(r"^ *([\d,]+) \([^)]*\) .*\[(\S+)\]$", done.stdout, re.MULTILINE)
    counted = [(int(number.replace(",", "")), made_of) for number, made_of in lines]
    within = sum(number for number, made_of in counted if made_of == str(library))
    return sum(number for number, _ in counted), within


def verbs(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows there too.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A second of measuring, and no callgrind.")] = False,
) -> None:
    """Operations posted a second on one core, doorbells, allocations; and a model of real NICs from them."""
    with tempfile.TemporaryDirectory() as folder:
        library, program = build(Path(folder))
        command = [str(program), str(library), "1" if quick else "8"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_S)
        found: dict[str, Any] = json.loads(done.stdout)
        counted = None if quick else instructions(program, library)
    operations = found["operations"]
    rate = found["operations_per_cpu_s"]
    made = [
        rows.Row(
            "verbs",
            "64 B writes on a null device, one core",
            "operations/s",
            rate,
            target=rows.Target(rows.VALUE, at_least=TARGET_OPERATIONS),
        ),
        rows.Row("verbs", "operations to a doorbell, batches of 1,024", "", operations / found["doorbells"]),
        rows.Row("verbs", "operations to a signalled one", "", operations / found["signalled"]),
        rows.Row(
            "verbs",
            "allocations",
            "",
            float(found["allocations"]),
            target=rows.Target(rows.VALUE, at_most=0),
        ),
        rows.Row("verbs", "instructions of an operation", "", counted and counted[0] - counted[1]),
        rows.Row("verbs", "and those of the null device for it", "", counted and counted[1]),
        *nics.model("verbs", rate, MTU / (MTU + HEADERS)),
    ]
    rows.show(made, Console())
    if json_file is not None:
        rows.write_json(made, json_file)
