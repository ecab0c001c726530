"""What a benchmark says: rows with a ratio and a target, as a table for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RATIO, VALUE = "ratio", "value"
P99 = ("ours_p99_us", "peer_p99_us")  # names of details: microseconds of a call that 1 % of the calls exceed
NOISE = "_others_cores"  # ends the names of details that tell how busy the rest of the machine was
QUIET_CORES = 0.3


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on a row's ratio (ours / peer's) or on our own value."""

    on: str
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        bound, sign = (self.at_most, "<=") if self.at_least is None else (self.at_least, ">=")
        return f"{sign} {bound:g}" + ("x" if self.on == RATIO else "")

    def met_by(self, ours: float | None, ratio: float | None) -> bool | None:
        """Whether the bound holds; None when there is nothing to compare with."""
        found = ratio if self.on == RATIO else ours
        if found is None:
            return None
        return found <= self.at_most if self.at_most is not None else found >= (self.at_least or 0.0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result. ``ours`` or ``peer_value`` is None where there was nothing to measure."""

    bench: str
    what: str
    unit: str
    ours: float | None
    peer: str = ""
    peer_value: float | None = None
    target: Target | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return self.ours / self.peer_value if self.ours is not None and self.peer_value else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None when there is none, or nothing to compare with."""
        return self.target.met_by(self.ours, self.ratio) if self.target else None

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in the JSON file; details are further keys."""
        return {
            "bench": self.bench,
            "what": self.what,
            "unit": self.unit,
            "ours": _rounded(self.ours),
            "peer": self.peer,
            "peer_value": _rounded(self.peer_value),
            "ratio": _rounded(self.ratio),
            "target": str(self.target) if self.target else None,
            "met": self.met,
            **{
                key: _rounded(value) if isinstance(value, float) else value
                for key, value in self.details.items()
            },
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def write_json(rows: Sequence[Row], file: Path) -> None:
    """Write all rows as one JSON array."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")


def write_markdown(rows: Sequence[Row], file: Path) -> None:
    """Write a Markdown table of each condition, to be copied into a README, and its count of targets."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.details.get("condition", ""), []).append(row)
    lines = []
    for condition, those in tables.items():
        lines += [f"{condition}:", ""] if condition and len(tables) > 1 else []
        lines += [*_table(those), "", f"{conclusion(those)}.", ""]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines))


def _table(rows: Sequence[Row]) -> list[str]:
    """Lines of one table. The 99th percentiles are there only if somebody measured them."""
    with_p99 = any(key in row.details for row in rows for key in P99)
    heads = ["what", "unit", "ours", "peer", "peer's", "ratio", "target", "met"]
    lines = [heads + ["ours, p99 us", "peer's, p99 us"] * with_p99]
    for row in rows:
        ours, theirs, ratio = (_shown(value) for value in (row.ours, row.peer_value, row.ratio))
        met = {None: "", True: "yes", False: "**no**"}[row.met]
        cells = [row.what, row.unit, ours, row.peer, theirs, ratio, str(row.target or ""), met]
        lines.append(cells + [_shown(row.details.get(key)) for key in P99] * with_p99)
    lines.insert(1, ["---"] * len(lines[0]))
    return [f"| {' | '.join(cells)} |" for cells in lines]


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table and, last, how many targets are met."""
    table = Table("what", "unit", "peer", title="ours and peers, by turns in one run", title_justify="left")
    for name in ("ours", "peer's", "ratio", "target", "met"):
        table.add_column(name, justify="right")
    for row in rows:
        met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row.met]
        numbers = [_shown(value) for value in (row.ours, row.peer_value, row.ratio)]
        table.add_row(row.what, row.unit, row.peer, *numbers, str(row.target or ""), met)
    console.print(table)
    for reason in sorted({row.details["absent"] for row in rows if "absent" in row.details}):
        console.print(f"absent: {reason}", markup=False)
    if (others := noise(rows)) > QUIET_CORES:
        text = f"not a quiet machine: others used up to {others:.1f} cores; peers that spin suffer most"
        console.print(text, style="yellow")
    console.print(conclusion(rows), markup=False)


def noise(rows: Sequence[Row]) -> float:
    """Cores that processes outside the benchmark kept busy in the noisiest measurement."""
    return max(
        (value for row in rows for key, value in row.details.items() if key.endswith(NOISE)), default=0.0
    )


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def conclusion(rows: Sequence[Row]) -> str:
    """Count the targets in one sentence."""
    judged = [row.met for row in rows if row.met is not None]
    unknown = sum(row.target is not None and row.met is None for row in rows)
    more = f"; {unknown} could not be judged, because a peer is absent" if unknown else ""
    return f"{sum(judged)} of {len(judged)} targets met{more}"
