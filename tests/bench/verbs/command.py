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
# NICs, gigabits a second of each, and what Mooncake has published for them in GB/s.
CLUSTERS = ((4, 200, 87.0), (8, 400, 190.0))
SLICES = (4 << 10, 64 << 10, 1 << 20)


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


def instructions(program: Path, library: Path) -> float | None:
    """Instructions of one operation, as callgrind counts them; None without callgrind."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        return None
    counted = []
    for operations in COUNTED:
        command = [valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", str(program)]
        command += [str(library), "0", str(operations)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_S)
        found = re.search(r"Collected : (\d+)", done.stderr)
        if found is None:
            return None
        counted.append(int(found[1]))
    return (counted[1] - counted[0]) / (COUNTED[1] - COUNTED[0])


def model(operations_per_s: float) -> list[rows.Row]:
    """What NICs would carry if nothing but their wires and one core's posting were in the way."""
    made = []
    for count, gigabits, published in CLUSTERS:
        wire = count * gigabits / 8 * MTU / (MTU + HEADERS)
        for slice_bytes in SLICES:
            posted = operations_per_s * slice_bytes / 1e9
            details = {"is_a_model": True, "cores_needed": wire / posted, "wire_gb_per_s": wire}
            what = f"model: {count} x {gigabits}G, slices of {slice_bytes >> 10} KiB, one core"
            value = min(wire, posted)
            made.append(rows.Row("verbs", what, "GB/s", value, "published", published, None, details))
    return made


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
        rows.Row("verbs", "instructions of an operation, the null device's with them", "", counted),
        *model(rate),
    ]
    rows.show(made, Console())
    if json_file is not None:
        rows.write_json(made, json_file)
