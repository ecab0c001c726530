"""Options of the efa driver, as users write them under ``TransferConfig.driver_options["efa"]``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mooncake_driver_efa.devices import SYS_INFINIBAND, efa_devices
from mooncake_transfer.driver_options import as_text, check_limits, checked
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import EndpointSpec, Unavailable

__all__ = ["EfaOptions", "endpoints", "render"]

NO_DEVICE = (
    f"no EFA device in {SYS_INFINIBAND}; use an instance type with EFA and its driver (modprobe efa), or "
    "choose another provider of libfabric with option provider"
)
# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "queue_depth": (1, 1 << 20),
    "endpoints": (1, 4096),
    "spin_us": (0, 1_000_000),
    "connect_timeout_s": (0.01, 3600),
    "dead_peer_timeout_s": (0.1, 3600),
}


class EfaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the driver. Raises ConfigError for values that cannot work.

    Attributes:
        provider: libfabric's provider, as ``fi_info`` names it: ``efa``, ``tcp;ofi_rxm``, ``verbs;ofi_rxm``,
            ``shm``. Peers must use the same.
        domain: the provider's domain to use, or the NIC that it is on. Empty: with ``efa`` every device, an
            endpoint (a rail) each, else the first domain of the provider.
        domains: several of them, with commas between, an endpoint each.
        library: path of libfabric. Empty: where the loader finds it, or AWS's installer puts it.
        queue_depth: how many operations may be under way or waiting to be fetched.
        endpoints: endpoints of the fabric (queue pairs) for each direction. Every peer gets one of its own up
            to this number; more peers share them, and the failure of one is then felt by those beside it.
        spin_us: where the provider cannot wake a sleeping thread, how long the progress thread looks without
            a pause for what is under way before it looks at intervals.
        connect_timeout_s: how long a peer may take to answer a greeting.
        dead_peer_timeout_s: how long a peer may be silent before it counts as gone.
    """

    provider: str = "efa"
    domain: str = ""
    domains: str = ""
    library: str = ""
    queue_depth: int = 4096
    endpoints: int = 64
    spin_us: int = 50
    connect_timeout_s: float = 5.0
    dead_peer_timeout_s: float = 6.0

    def __post_init__(self) -> None:
        if not self.provider:
            raise ConfigError("efa option provider is empty; `fi_info -l` lists what there is")
        if self.domain and self.domains:
            raise ConfigError("efa options domain and domains say the same in two ways; give one of them")
        listed = _listed(self.domains)
        if "" in listed or len(set(listed)) != len(listed):
            raise ConfigError(f"efa option domains has an empty or repeated entry: {', '.join(listed)}")
        check_limits("efa", self, LIMITS)


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into the strings of one endpoint. Raises ConfigError."""
    return _text(checked("efa", EfaOptions, options))


def endpoints(options: Mapping[str, object]) -> list[EndpointSpec] | Unavailable:
    """Check options and describe the endpoints, one for each device or domain. Raises ConfigError.

    Unavailable where the provider is ``efa`` and the machine has no such device.
    """
    wanted = checked("efa", EfaOptions, options)
    nodes = {device.name: device.numa_node for device in efa_devices()}
    names = _listed(wanted.domains) or [wanted.domain]
    if names == [""] and wanted.provider == "efa":
        if not nodes:
            return Unavailable(NO_DEVICE)
        names = list(nodes)
    return [
        EndpointSpec(
            name, _text(msgspec.structs.replace(wanted, domain=name, domains="")), nodes.get(name, -1)
        )
        for name in names
    ]


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _text(options: EfaOptions) -> dict[str, str]:
    return as_text(options, without=("domains",))
