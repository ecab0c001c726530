"""How soon the first byte of a very long list of blocks moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from contestant import ContestantFailed
from rows import VALUE, Row, Target
from spinners import IDLE
from transfer import cases
from transfer.contestants import started

BLOCKS, BLOCK_BYTES = 100_000, 256
LIMIT = Target(VALUE, at_most=2.0)


def posting_rows(
    wanted: Callable[[str], bool], folder: Path | None, repeats: int, progress: Callable[[str], None]
) -> list[Row]:
    """Post the list several times over each driver; the slowest first byte counts."""
    what_of = {
        name: f"{name.removeprefix('ours-')} posting {BLOCKS:,} blocks of {BLOCK_BYTES} B, first byte moved"
        for name in (cases.SHM, cases.TCP)
    }
    what_of = {name: what for name, what in what_of.items() if wanted(what)}
    rows = []
    with started(what_of, folder, progress) as (contestants, absent):
        for name, what in what_of.items():
            found, details = [], dict[str, object](condition=IDLE)
            progress(what)
            try:
                if name not in contestants:
                    raise ContestantFailed(absent[name])
                for _ in range(repeats):
                    found.append(contestants[name].ask("first_byte", size=BLOCK_BYTES, count=BLOCKS))
            except ContestantFailed as failure:
                details["absent"] = str(failure)
            slowest = max((one["first_us"] for one in found), default=None)
            for key in ("posted_us", "done_us") if found else ():
                details[f"slowest_{key}"] = max(one[key] for one in found)
            ours = None if slowest is None else slowest / 1e3
            rows.append(Row("transfer", what, f"ms, max of {repeats}", ours, target=LIMIT, details=details))
    return rows
