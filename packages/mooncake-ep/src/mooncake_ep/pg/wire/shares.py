"""How elements are shared out among ranks."""

from __future__ import annotations

import math

__all__ = ["shares_of"]

_LINE = 64


def shares_of(count: int, parts: int, itemsize: int) -> list[tuple[int, int]]:
    """Cut `count` elements into whole cache lines for each of `parts`: begin and end in bytes."""
    line = max(_LINE // itemsize, 1)
    each = math.ceil(math.ceil(count / parts) / line) * line
    return [(min(i * each, count) * itemsize, min((i + 1) * each, count) * itemsize) for i in range(parts)]
