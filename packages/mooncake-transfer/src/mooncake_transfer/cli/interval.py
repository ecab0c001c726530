"""How often a command that shows something live looks again."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Interval"]

A_DAY_S = 86_400.0

Interval = Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05, max=A_DAY_S)]
"""An option of so many seconds; a float, with a default of the command's own."""
