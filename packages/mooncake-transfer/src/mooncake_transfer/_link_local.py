"""Link-local addresses: good only with an interface, and that of the machine that uses them."""

from __future__ import annotations

import ipaddress

from mooncake_transfer._errors import PeerUnreachable
from mooncake_transfer.topology.addresses import interface_addresses

__all__ = ["with_interface", "without_interface"]


def without_interface(host: str) -> str:
    """Return what peers may be told of an address: not the interface, which they have others of."""
    address, percent, _ = host.partition("%")
    return address if percent and _address(address) is not None else host


def with_interface(host: str, own_host: str) -> str:
    """Return the address as this machine reaches it: a link-local one without an interface is given one.

    That of ``own_host`` if it has one; else the one that has this very address; else the only one of this
    machine that has a link-local address. Raises PeerUnreachable when that leaves none, or several.
    """
    address = _address(host)
    if address is None or not address.is_link_local or "%" in host:
        return host
    interface = own_host.partition("%")[2] or _leading_to(address)
    return f"{host}%{interface}"


def _address(host: str) -> ipaddress.IPv6Address | None:
    try:
        return ipaddress.IPv6Address(host)
    except ValueError:
        return None


def _leading_to(address: ipaddress.IPv6Address) -> str:
    able: dict[str, set[ipaddress.IPv6Address]] = {}
    for name, texts in interface_addresses().items():
        own = {found for found in map(_address, texts) if found is not None and found.is_link_local}
        if own:
            able[name] = own
    holding = [name for name, own in able.items() if address in own]
    names = holding or list(able)
    if len(names) == 1:
        return names[0]
    which = (
        f"any of {', '.join(names)} could lead there" if names else "no interface here has such an address"
    )
    raise PeerUnreachable(
        f"{address} is link-local, and {which}; set TransferConfig.host to an address with its interface, "
        f"such as fe80::1%eth0 (a peer that is named by its address may be written [{address}%eth0]:port)"
    )
