"""Engines that a command makes for a while."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake_transfer.config import TransferConfig

__all__ = ["visitor_config"]

# Options of drivers that name ports of their own, which the engine that runs here for good has.
OWN_PORTS = frozenset({"port", "port_min", "port_max"})


def visitor_config(**arguments: Any) -> TransferConfig:
    """Settings as configured here (TLS, host, registry), but on any free port, without a name or metrics.

    Raises ConfigError.
    """
    config = TransferConfig.load(**{"port": 0, "name": "", "metrics_port": None, **arguments})
    options = {
        driver: {name: value for name, value in given.items() if name not in OWN_PORTS}
        for driver, given in config.driver_options.items()
    }
    return msgspec.structs.replace(config, driver_options=options)
