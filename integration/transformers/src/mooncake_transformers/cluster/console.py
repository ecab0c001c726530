"""Shows a cluster's progress: a live table on a terminal, one line a step in a log."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mooncake_transfer.console import plain_console
from mooncake_transformers.cluster.progress import Progress

__all__ = ["ClusterView", "make_console"]

LOG_WIDTH = 118
STATE_STYLE = {
    "starting": "yellow",
    "ready": "green",
    "died": "bold red",
    "stopping": "yellow",
    "stopped": "dim",
}
BUSY_STATES = ("starting", "stopping")
TITLES = {"store": "store master", "conductor": "conductor"}


def make_console(*, stderr: bool = False) -> Console:
    """A console that keeps tables whole in a log file, where rich would assume 80 columns."""
    console = plain_console(stderr=stderr)
    return console if console.is_terminal else plain_console(stderr=stderr, width=LOG_WIDTH)


class ClusterView:
    """Draws ``Progress`` steps; a context manager. ``show`` may be called from any thread.

    On a terminal the parts form a table redrawn in place; elsewhere each step is one line that starts with
    the seconds since the view was opened, so that a log tells what took how long.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._latest: dict[str, tuple[Progress, float]] = {}
        self._spinner = Spinner("dots", style="yellow")
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> ClusterView:
        """Begin to draw."""
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave what is drawn as it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, progress: Progress) -> None:
        """Take note of one step and draw it."""
        elapsed_s = time.monotonic() - self._began_s
        with self._lock:
            self._latest[progress.part] = (progress, elapsed_s)
        if self._live is None:
            self._console.print(_as_line(progress, elapsed_s), soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            latest = list(self._latest.values())
        table = Table.grid(padding=(0, 2))
        for progress, elapsed_s in latest:
            style = STATE_STYLE[progress.state]
            is_busy = progress.state in BUSY_STATES
            mark: RenderableType = self._spinner if is_busy else Text("●", style=style)
            shown_s = time.monotonic() - self._began_s if is_busy else elapsed_s
            state = Text(progress.state, style=style)
            table.add_row(
                mark, _title(progress.part), state, Text(f"{shown_s:5.1f} s"), Text(progress.detail)
            )
        return Group(table)


def _as_line(progress: Progress, elapsed_s: float) -> Text:
    line = Text(f"{elapsed_s:6.1f} s  {_title(progress.part):<13} ")
    line.append(progress.state, style=STATE_STYLE[progress.state])
    if progress.detail:
        line.append(f"  {progress.detail}")
    return line


def _title(part: str) -> str:
    return TITLES.get(part, part)
