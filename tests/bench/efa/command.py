"""The efa driver's own cost: over a libfabric whose operations are over when they are posted, on one core."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import nics
import rows
import typer
from rich.console import Console

__all__ = ["efa"]

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "drivers/efa/tests"
TARGET_OPERATIONS = 3e6
COUNTED = (1 << 19, 1 << 20)
BUILD_S, RUN_S = 100, 300
# What SRD adds to each packet is not published; packets are of up to 9 KB.
PAYLOAD = 1.0
INSIDE = "--toggle-collect=*Bench::run*"


class Measurement:
    """The double of libfabric and the program that drives the installed core, built in a folder."""

    def __init__(self, folder: Path) -> None:
        self.double, self.probe = folder / "libfabric_double.so", folder / "hot_path.so"
        compiler = [*(os.environ.get("CXX") or "c++").split(), "-std=c++20", "-O2", "-pthread"]
        compiler += ["-fPIC", "-shared", f"-I{ROOT / 'drivers/efa/core'}", f"-I{ROOT / 'abi'}"]
        double = map(str, sorted((TESTS / "double").glob("*.cpp")))
        hidden = ["-fvisibility=hidden", "-o", str(self.double)]
        subprocess.run([*compiler, *hidden, *double], check=True, timeout=BUILD_S)
        source = str(TESTS / "native/hot_path.cpp")
        subprocess.run([*compiler, "-o", str(self.probe), source, "-ldl"], check=True, timeout=BUILD_S)

    def run(
        self, seconds: float, operations: int = 0, under: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        """For some seconds or, when it is not 0, a number of operations; under another program."""
        script = [sys.executable, str(TESTS / "native/hot_path.py"), str(self.probe), str(self.double)]
        return subprocess.run(
            [*under, *script, str(seconds), str(operations)],
            env=os.environ | {"LD_PRELOAD": str(self.probe)},
            capture_output=True,
            text=True,
            check=True,
            timeout=RUN_S,
        )

    def instructions(self) -> float | None:
        """Instructions of one operation, as callgrind counts them; None without callgrind."""
        valgrind = shutil.which("valgrind")
        if valgrind is None:
            return None
        counted = []
        for operations in COUNTED:
            # The thread that posts and polls; the driver's own would find more to do, as all is slow here.
            under = (valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", INSIDE)
            found = re.search(r"Collected : (\d+)", self.run(0, operations, under).stderr)
            if found is None:
                return None
            counted.append(int(found[1]))
        return (counted[1] - counted[0]) / (COUNTED[1] - COUNTED[0])


def efa(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows there too.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A second of measuring, and no callgrind.")] = False,
) -> None:
    """Operations posted a second on one core, doorbells, allocations; and a model of real NICs from them."""
    with tempfile.TemporaryDirectory() as folder:
        measurement = Measurement(Path(folder))
        found: dict[str, Any] = json.loads(measurement.run(1 if quick else 8).stdout)
        in_all: dict[str, Any] = json.loads(measurement.run(0, COUNTED[-1]).stdout)
        counted = None if quick else measurement.instructions()
    rate = found["operations_per_cpu_s"]
    at_least = rows.Target(rows.VALUE, at_least=TARGET_OPERATIONS)
    none = rows.Target(rows.VALUE, at_most=0)
    made = [
        rows.Row("efa", "64 B writes over a null provider, one core", "operations/s", rate, target=at_least),
        rows.Row(
            "efa", "operations to a doorbell, batches of 1,024", "", found["operations"] / found["doorbells"]
        ),
        rows.Row("efa", "allocations in a million", "", float(in_all["allocations"]), target=none),
        rows.Row("efa", "instructions of an operation, the null provider's with them", "", counted),
        *nics.model("efa", rate, PAYLOAD),
    ]
    rows.show(made, Console())
    if json_file is not None:
        rows.write_json(made, json_file)
