"""How an operation ends, as the compiled engine says it, too."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["Again", "Code", "Outcome", "Stop"]


class Code(enum.IntEnum):
    """As in core/pg/result.hpp."""

    DONE = 0
    PARTIAL = 1
    EVICTED = 2
    RANK_FAILED = 3
    MISMATCH = 4
    TIMEOUT = 5
    INTERRUPTED = 6
    INVALID = 7
    SYSTEM = 8


@dataclass
class Outcome:
    """The end of an operation."""

    code: int = Code.DONE
    reason: str = ""
    contributors: list[int] = field(default_factory=list)
    source: int = -1


class Stop(Exception):
    """Ends an operation from within; caught where operations are run."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Again(Exception):
    """The view changed before the operation ended: it is run again in the next one."""
