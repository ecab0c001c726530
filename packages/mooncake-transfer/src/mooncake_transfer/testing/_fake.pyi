"""
Compiled core of mooncake_transfer.testing.fake; use it through that module.
"""

from typing_extensions import CapsuleType


def driver(name: str) -> CapsuleType:
    """The C function table of a fake driver of this name, as a PyCapsule."""

class Fabric:
    """Devices and links of fake drivers, and their clock."""

    def __init__(self, seed: int, manual_clock: bool) -> None: ...

    @property
    def number(self) -> int: ...

    def close(self) -> None: ...

    def now_ns(self) -> int: ...

    def advance(self, ns: int) -> None: ...

    def devices(self) -> list[str]: ...

    def set(self, device: str, field: str, value: float) -> None: ...

    def set_alive(self, device: str, alive: bool) -> None: ...

    def set_frozen(self, device: str, frozen: bool) -> None: ...

    def set_holding(self, device: str, holding: bool) -> None: ...

    def held_in(self, device: str) -> int: ...

    def set_link(self, one: str, other: str, up: bool) -> None: ...

    def inject_notice(self, device: str, data: bytes) -> None:
        """Deliver it to the device as if a peer had sent it."""

    def counters(self, device: str) -> dict[str, int]: ...

    def served(self, device: str) -> list[tuple[str, str, int, int, int, int, int]]:
        """
        Peer, opcode, region id of the peer, local offset, remote offset, length, stream of each.
        """
