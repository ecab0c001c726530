"""``hatch run bench nvlink``: reads of another process's GPU memory, against a plain copy on the same GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rows import RATIO, Row, Target, show, write_json

from mooncake_driver_nvlink import plugin
from mooncake_transfer.hooks import Unavailable

__all__ = ["nvlink"]

SCRIPT = Path(__file__).parents[2] / "drivers" / "nvlink" / "tests" / "on_gpu.py"
LIMIT_S = 600
MIB = 1 << 20


def nvlink(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the rows there.")] = None,
) -> None:
    """Read another process's GPU memory; needs a GPU."""
    found = plugin.probe({})
    if isinstance(found, Unavailable):
        Console().print(f"skipped: {found.reason}", markup=False)
        return
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    rows = [
        Row(
            "nvlink",
            f"read {int(size) // MIB} MiB of another process",
            "GB/s",
            values["read_gb_s"],
            peer=f"copy on {measured['gpu']}",
            peer_value=values["copy_gb_s"],
            target=Target(RATIO, at_least=0.95),
        )
        for size, values in measured["sizes"].items()
    ]
    show(rows, Console())
    if json_file is not None:
        write_json(rows, json_file)
