"""How a client asks its master: over the channel, or straight when the master lives in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from mooncake_store import protocol
from mooncake_store._errors import (
    ConfigError,
    MasterNotLeading,
    MasterRefused,
    MasterUnreachable,
    NotAuthorised,
    ProtocolMismatch,
    StoreClosed,
    StoreError,
)
from mooncake_store.master import Master
from mooncake_store.protocol import METHOD, Reply, Request
from mooncake_store.protocol.express import (
    EXPRESS_FEATURE,
    EXPRESS_METHOD,
    OtherWay,
    express_reply,
    express_request,
    other_way,
)
from mooncake_transfer import Peer, TransferEngine
from mooncake_transfer.errors import CallTimeout, EngineClosed, PeerUnreachable, RemoteError
from mooncake_transfer.errors import ConfigError as TransferConfigError

__all__ = ["Link", "LocalLink", "RemoteLink", "not_answered", "open_remote"]


# For how long nothing goes the express way after the master has sent something the other way for a moment.
OTHER_WAY_S = 0.02
# What a master raises and its clients, too.
KINDS = {
    kind.__name__: kind for kind in (MasterUnreachable, MasterNotLeading, NotAuthorised, ProtocolMismatch)
}


class Link(Protocol):
    """One connection to one master.

    Attributes:
        express_connection: the number of the channel's connection over which it takes the express way; 0:
            none.
    """

    @property
    def express_connection(self) -> int:
        """See above."""
        ...

    def call(self, request: Request, timeout_s: float) -> Reply:
        """The master's answer. Raises MasterUnreachable, MasterRefused or StoreClosed."""
        ...


class LocalLink:
    """Calls a master of this process."""

    express_connection = 0

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
        self.express_connection = 0
        self._express_from_s = float("inf")  # when requests may go the express way (again)
        self._never_express: set[type[Request]] = set()
        self._skips_one = False  # the next request has been tried already

    def call(self, request: Request, timeout_s: float) -> Reply:
        """See :class:`Link`."""
        try:
            reply = self._call_express(request, timeout_s)
            if reply is None:
                payload = self._peer.call(METHOD, protocol.encode(request), timeout_s=timeout_s)
                reply = protocol.decode_reply(payload)
                if isinstance(reply, protocol.Mounted) and EXPRESS_FEATURE in reply.features:
                    self._express_from_s = 0.0
                    self._never_express.clear()
                    self.express_connection = self._peer.connection
            return reply
        except (PeerUnreachable, CallTimeout, EngineClosed) as error:
            raise not_answered(self._where, error) from error
        except RemoteError as error:
            known = KINDS.get(error.kind)
            if known is not None:
                raise known(f"{self._where}: {error.message}") from error
            raise MasterRefused(f"{self._where} does not take {type(request).__name__}: {error}") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise MasterRefused(
                f"{self._where} gave an answer that cannot be read, is it of another version? {error}"
            ) from error

    def goes_other_way(self, answer: bytes) -> None:
        """The master has sent the next request the other way, by an answer to compiled code."""
        self._skips_one = True
        if other_way(answer) is OtherWay.FOR_A_MOMENT:
            self._rest()

    def _rest(self) -> None:
        self._express_from_s = time.monotonic() + OTHER_WAY_S

    @property
    def _where(self) -> str:
        return f"store master at {self._peer.address}"

    def _call_express(self, request: Request, timeout_s: float) -> Reply | None:
        """The answer; None when it has to be asked for the other way, and nothing was done."""
        if self._express_from_s and time.monotonic() < self._express_from_s:
            return None
        if self._skips_one:
            self._skips_one = False
            return None
        asked = None if type(request) in self._never_express else express_request(request)
        if asked is None:
            return None
        answer = self._peer.call(EXPRESS_METHOD, asked, timeout_s=timeout_s)
        reply = express_reply(request, answer)
        if reply is None:
            what = other_way(answer)
            if what is OtherWay.FOR_GOOD:
                self._never_express.add(type(request))
            elif what is OtherWay.FOR_A_MOMENT:
                self._rest()
        return reply


def not_answered(where: str, error: Exception) -> StoreError:
    """What it means for the store that a call through the channel, to the master ``where``, has failed."""
    if isinstance(error, EngineClosed):
        return StoreClosed(f"the transfer engine of this store has been closed: {error}")
    return MasterUnreachable(f"{where} does not answer: {error}")


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
