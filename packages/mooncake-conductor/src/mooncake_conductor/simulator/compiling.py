"""Functions compiled by numba, where it is installed; without it they are the same, slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["compiled"]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, *, keep: bool = True) -> Function:
    """The function, compiled by numba where it is installed; ``keep``: for later processes, too."""
    try:
        import numba
    except ImportError:
        return function  # the same, slower
    made: Any = numba.njit(cache=keep)(function)
    return cast("Function", made)
