"""Engines that commands make for a while."""

from __future__ import annotations

import pytest

from mooncake_transfer.cli.visitor import visitor_config


def test_a_visitor_takes_no_port_of_the_engine_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PORT": "7000", "NAME": "node", "METRICS_PORT": "9000"}
    given |= {"DRIVER_OPTIONS__TCP__PORT_MIN": "18000", "DRIVER_OPTIONS__TCP__PORT_MAX": "18001"}
    given |= {"DRIVER_OPTIONS__TCP__CONNECTIONS": "3", "DRIVER_OPTIONS__NIXL__PORT": "5000"}
    for name, value in given.items():
        monkeypatch.setenv(f"MOONCAKE_TRANSFER_{name}", value)
    config = visitor_config()
    assert (config.port, config.name, config.metrics_port) == (0, "", None)
    assert config.driver_options == {"tcp": {"connections": 3}, "nixl": {}}
