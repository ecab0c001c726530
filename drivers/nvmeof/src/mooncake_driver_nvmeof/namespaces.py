"""NVMe namespaces behind NVMe/TCP targets, as sources of regions; no kernel module and no root needed."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_transfer.errors import ConfigError, PeerUnreachable, RegionRefused, TransferError
from mooncake_transfer.memory import DeviceSource

__all__ = ["Namespace", "namespace"]

# mc_status
OK, INVALID, UNREACHABLE, REFUSED = 0, 2, 5, 6
ERRORS: dict[int, type[TransferError]] = {
    INVALID: ConfigError,
    UNREACHABLE: PeerUnreachable,
    REFUSED: RegionRefused,
}


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a target told of a namespace.

    Attributes:
        location: its URL, with all that a driver needs to know.
        nbytes: its size in bytes.
        block_bytes: size of its blocks; what is aligned to them is moved without a copy.
        nguid: its 16-byte identifier, zeros when the target gives none.
        uuid: the same for its UUID.
        model: of the controller.
        serial: of the controller.
    """

    location: str
    nbytes: int
    block_bytes: int
    nguid: bytes
    uuid: bytes
    model: str
    serial: str

    def source(self, offset: int = 0, nbytes: int | None = None) -> DeviceSource:
        """All of it, or ``nbytes`` from ``offset`` on, for ``TransferEngine.register``.

        Raises ConfigError for a part that is not inside.
        """
        size = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or size <= 0 or offset + size > self.nbytes:
            raise ConfigError(
                f"{self.location} has {self.nbytes} bytes; {size} from {offset} on do not lie in it"
            )
        return DeviceSource(self.location, size, offset)


def namespace(
    url: str,
    *,
    host_nqn: str = "",
    header_digest: bool = False,
    data_digest: bool = False,
    timeout_s: float = 5.0,
) -> Namespace:
    """Connect to ``nvme-tcp://HOST:PORT/SUBSYSTEM-NQN?nsid=1``, ask for the namespace, and disconnect.

    ``host_nqn`` and the digests as in the driver's options. Raises ConfigError for a malformed URL,
    PeerUnreachable when no target answers within ``timeout_s`` (each of connecting and asking), RegionRefused
    when it admits no such host or has no such namespace.
    """
    from mooncake_driver_nvmeof import _core
    from mooncake_driver_nvmeof.options import default_host_nqn

    status, reason, facts = _core.identify(
        url, host_nqn or default_host_nqn(), header_digest, data_digest, timeout_s
    )
    if status != OK:
        raise ERRORS.get(status, TransferError)(reason)
    block, most = facts["block_bytes"], facts["most_bytes"]
    assert isinstance(block, int)
    joint = "&" if "?" in url else "?"
    return Namespace(
        location=f"{url}{joint}block={block}" + (f"&most={most}" if most else ""),
        nbytes=int(str(facts["blocks"])) * block,
        block_bytes=block,
        nguid=bytes(facts["nguid"]) if isinstance(facts["nguid"], bytes) else b"",
        uuid=bytes(facts["uuid"]) if isinstance(facts["uuid"], bytes) else b"",
        model=str(facts["model"]),
        serial=str(facts["serial"]),
    )
