"""What cores of drivers that have no bench of their own cost by themselves, over doubles of the hardware."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import rows
import typer
from rich.console import Console

from mooncake_transfer.testing.hot_path import HotPath, allocations, instructions

__all__ = ["cost"]

DRIVERS = Path(__file__).resolve().parents[2] / "drivers"


@contextlib.contextmanager
def over_cuda() -> Iterator[HotPath]:
    """Between memories of one GPU of the double."""
    with _module("nvlink/tests/double", "cuda_double").installed() as library:
        kind = "cuda_memory:malloc"
        yield HotPath("nvlink", {"library": str(library)}, near=kind, far=kind)


@contextlib.contextmanager
def over_cann() -> Iterator[HotPath]:
    """Between memories of one NPU of the doubles."""
    with _module("ascend/tests/double", "cann").installed() as cann:
        kind = "npu_memory:huge"
        yield HotPath("ascend", {"library": str(cann / "lib64/libascendcl.so")}, near=kind, far=kind)


@contextlib.contextmanager
def over_nvme_tcp() -> Iterator[HotPath]:
    """The initiator in user space, and the target of the driver's tests."""
    yield _module("nvmeof/tests", "test_hot_path").SERVED


@contextlib.contextmanager
def over_files() -> Iterator[HotPath]:
    """A file where temporary files are."""
    yield _module("nvmeof/tests", "test_hot_path").FILED


def _module(folder: str, name: str) -> Any:
    sys.path.insert(0, str(DRIVERS / folder))
    return importlib.import_module(name)


# And how many batches, fewer and more, are counted.
WAYS = {
    "nvlink": (over_cuda, (16, 80)),
    "ascend": (over_cann, (16, 80)),
    "nvmeof": (over_files, (64, 320)),
    "nvmeof, NVMe/TCP": (over_nvme_tcp, (8, 40)),
}


def cost(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows there too.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="These drivers only.")] = None,
) -> None:
    """Allocations and instructions of the driver's own object for one small write."""
    made = []
    for name, (way, batches) in WAYS.items():
        if only and name not in only:
            continue
        with way() as path:
            found = allocations(path, batches[1])
            counted = instructions(path, batches)
        none = rows.Target(rows.VALUE, at_most=0)
        size = f"writes of {path.block_bytes} B"
        made.append(rows.Row(name, f"allocations, {size}", "", float(found.allocations), target=none))
        made.append(rows.Row(name, f"instructions of one, {size}", "", counted))
    rows.show(made, Console())
    if json_file is not None:
        rows.write_json(made, json_file)
