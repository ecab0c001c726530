"""The verbs driver over the double of libibverbs, as a driver that every process of a test finds."""

from __future__ import annotations

from collections.abc import Mapping

from verbs_double_library import LIBRARY

from mooncake_driver_verbs.options import VerbsOptions, endpoints_of
from mooncake_driver_verbs.plugin import load
from mooncake_transfer.driver_options import checked
from mooncake_transfer.hooks import Available, DriverInfo, EndpointSpec, hookimpl


def endpoints(options: Mapping[str, object]) -> list[EndpointSpec]:
    """One endpoint on each device that is named; double0 when none is."""
    given = {"devices": "double0", "library": LIBRARY, **options}
    return endpoints_of(checked("verbs", VerbsOptions, given), [])


@hookimpl
def mooncake_transfer_drivers() -> list[DriverInfo]:
    """Offer the driver as ``verbs_double``."""
    return [
        DriverInfo(
            "verbs_double",
            frozenset({"dram", "cuda"}),
            priority=61,
            probe=Available,
            load=load,
            options=lambda options: endpoints(options)[0].options,
            network=True,
            endpoints=endpoints,
            trusted_probe=True,
        )
    ]
