"""Engines that a command makes for a while."""

from __future__ import annotations

from typing import Any

from mooncake_transfer.config import TransferConfig

__all__ = ["visitor_config"]


def visitor_config(**arguments: Any) -> TransferConfig:
    """Settings as configured here (TLS, host, registry), but on any free port, without a name or metrics.

    Raises ConfigError.
    """
    return TransferConfig.load(**{"port": 0, "name": "", "metrics_port": None, **arguments})
