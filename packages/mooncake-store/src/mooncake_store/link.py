"""How a client asks its master: over the channel, or straight when the master lives in the same process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from mooncake_store import protocol
from mooncake_store._errors import ConfigError, MasterRefused, MasterUnreachable, StoreClosed
from mooncake_store.master import Master
from mooncake_store.protocol import METHOD, Reply, Request
from mooncake_transfer import Peer, TransferEngine
from mooncake_transfer.errors import ConfigError as TransferConfigError
from mooncake_transfer.errors import EngineClosed, PeerUnreachable, RemoteError

__all__ = ["Link", "LocalLink", "RemoteLink", "open_remote"]


class Link(Protocol):
    """One connection to one master."""

    def call(self, request: Request, timeout_s: float) -> Reply:
        """The master's answer. Raises MasterUnreachable, MasterRefused or StoreClosed."""
        ...


class LocalLink:
    """Calls a master of this process."""

    def __init__(self, master: Master, bell: Callable[[], None]) -> None:
        self._master = master
        self._bell = bell

    def call(self, request: Request, timeout_s: float) -> Reply:
        """See :class:`Link`."""
        return self._master.call_local(request, self._bell)


class RemoteLink:
    """Calls a master through the engine's channel."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def call(self, request: Request, timeout_s: float) -> Reply:
        """See :class:`Link`."""
        where = f"store master at {self._peer.address}"
        try:
            payload = self._peer.call(METHOD, protocol.encode(request), timeout_s=timeout_s)
            return protocol.decode_reply(payload)
        except PeerUnreachable as error:
            raise MasterUnreachable(f"{where} does not answer: {error}") from error
        except EngineClosed as error:
            raise StoreClosed(f"the transfer engine of this store has been closed: {error}") from error
        except RemoteError as error:
            if error.kind == MasterUnreachable.__name__:
                raise MasterUnreachable(f"{where}: {error.message}") from error
            raise MasterRefused(f"{where} does not take {type(request).__name__}: {error}") from error
        except msgspec.DecodeError as error:
            raise MasterRefused(
                f"{where} gave an answer that cannot be read, is it of another version? {error}"
            ) from error


def open_remote(engine: TransferEngine, address: str, timeout_s: float) -> RemoteLink:
    """Connect to the master at ``host:port``. Raises MasterUnreachable, ConfigError or StoreClosed."""
    try:
        return RemoteLink(engine.connect(address, timeout_s=timeout_s))
    except PeerUnreachable as error:
        raise MasterUnreachable(
            f"no store master can be reached at {address}: {error}; start one with `mooncake store master`, "
            f"or correct the address"
        ) from error
    except TransferConfigError as error:
        raise ConfigError(f"the store master's address is wrong: {error}") from error
    except EngineClosed as error:
        raise StoreClosed(f"the transfer engine of this store has been closed: {error}") from error
