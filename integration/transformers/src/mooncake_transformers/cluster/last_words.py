"""Finds, in the log of a process that died, the one line that says why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

__all__ = ["last_words"]

# What a command prints before it ends, with the program's name or "error" in front; only the rest is news.
COMMAND_ERROR = re.compile(r"^(?:error|mooncake\b[^:]*): (?=.)", re.IGNORECASE)
# The last line of a traceback: "module.ErrorName: text".
TRACEBACK_END = re.compile(r"^(?:[a-z]\w*\.)*[A-Z]\w*: .")
LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d[ T]|^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def last_words(log_tail: Sequence[str]) -> str:
    """Return the last error message in a log, as one line; without one the last line, or ``""``.

    A message that was wrapped is given whole: it goes on up to the next line that is a log record.
    """
    lines = [ANSI_STYLE.sub("", line).strip(" │╭╰─╮╯") for line in log_tail]
    lines = [line for line in lines if line]
    for position in range(len(lines) - 1, -1, -1):
        if COMMAND_ERROR.match(lines[position]) or TRACEBACK_END.match(lines[position]):
            rest = takewhile(lambda line: not LOG_LINE.match(line), lines[position + 1 :])
            return COMMAND_ERROR.sub("", " ".join([lines[position], *rest]))
    return lines[-1] if lines else ""
