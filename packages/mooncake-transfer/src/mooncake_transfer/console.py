"""How every command writes to a terminal: what it is told, and nothing made of it.

rich turns ``:ab:`` into a picture, also where markup is off, and that is a part of PCI and IPv6 addresses.
"""

from __future__ import annotations

from typing import IO

from rich.console import Console

__all__ = ["plain_console", "print_line"]


def plain_console(*, stderr: bool = False, file: IO[str] | None = None, width: int | None = None) -> Console:
    """A console that replaces no emoji codes and colours nothing by itself; markup works.

    Args:
        stderr: write to standard error instead of standard output.
        file: write to this stream instead.
        width: columns; by default those of the terminal, or 80.
    """
    return Console(stderr=stderr, file=file, width=width, emoji=False, highlight=False)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print ``text`` as it is, unwrapped and without markup: brackets stay what they are."""
    console.print(text, style=style, markup=False, soft_wrap=True)
