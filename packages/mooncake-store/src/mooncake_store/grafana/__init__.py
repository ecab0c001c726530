"""The Grafana dashboard of a store; ``mooncake store dashboard`` writes it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["dashboard"]


def dashboard() -> str:
    """The dashboard as JSON, to be imported in Grafana 10 or later."""
    return Path(__file__).with_name("dashboard.json").read_text(encoding="utf-8")
