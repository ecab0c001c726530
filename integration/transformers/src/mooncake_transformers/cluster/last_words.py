"""Finds, in the log of a process that died, the one line that says why."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["last_words"]

# "ModuleName.ErrorName: text", the last line of a traceback, and "error: text", what a command prints.
ERROR_LINE = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Unavailable|Taken|NotFound|Refused|Interrupt)\b|error)\s*: .+", re.I
)
ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def last_words(log_tail: Sequence[str]) -> str:
    """Return the last line that looks like an error's message, else the last line that has text, else ``""``.

    A message that was wrapped over several lines is given whole: what follows an error line belongs to it.
    """
    lines = [ANSI_STYLE.sub("", line).strip(" │╭╰─╮╯") for line in log_tail]
    lines = [line for line in lines if line]
    for position in range(len(lines) - 1, -1, -1):
        if ERROR_LINE.match(lines[position]):
            return " ".join(lines[position:]).removeprefix("error: ").removeprefix("Error: ")
    return lines[-1] if lines else ""
