"""What two endpoints say to one another before and beside NIXL: who may use which region, and until when."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable

import msgspec

__all__ = ["Ask", "Grant", "Hello", "Line", "Message", "PeerAddress", "Released", "Withdrawn"]

VERSION = 1
HEADER_BYTES = 4
LONGEST_BYTES = 1 << 20


class PeerAddress(msgspec.Struct, frozen=True, array_like=True):
    """How a peer reaches an endpoint, and proves that it was told so."""

    version: int
    host: str
    port: int
    secret: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Initiator: the first thing said."""

    version: int
    secret: bytes


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Initiator: may I use the region? ``remote`` is its own number for it."""

    remote: int
    region_id: int
    key: bytes


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Target: yes, in this way; or no, for that reason. ``agent`` is NIXL's name for the target."""

    remote: int
    reason: str = ""
    lease: int = 0
    access: int = 0
    address: int = 0
    length: int = 0
    agent: str = ""
    metadata: bytes = b""


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """Target: begin nothing more under the lease, and say when the last transfer is over."""

    lease: int


class Released(msgspec.Struct, frozen=True, tag=True):
    """Initiator: nothing of mine touches the region any more."""

    lease: int


Message = Hello | Ask | Grant | Withdrawn | Released


class Line:
    """One end of a connection. Never blocks; not thread-safe."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connected: socket.socket,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._selector = selector
        self._socket = connected
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Message)
        self.open = True
        connected.setblocking(False)
        selector.register(connected, selectors.EVENT_READ | selectors.EVENT_WRITE, self.ready)

    def send(self, message: Message) -> None:
        """Send, or keep until the socket takes it."""
        if not self.open:
            return
        body = msgspec.msgpack.encode(message)
        self._unsent += len(body).to_bytes(HEADER_BYTES, "little") + body
        self._flush()

    def close(self, reason: str = "") -> None:
        """End the connection; ``on_end`` is told the reason when there is one."""
        if not self.open:
            return
        self.open = False
        self._selector.unregister(self._socket)
        self._socket.close()
        if reason:
            self._on_end(reason)

    def ready(self, events: int) -> None:
        """Go on; called when the socket is ready."""
        if events & selectors.EVENT_WRITE:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                return self.close(f"the peer cannot be reached (errno {error})")
            self._flush()
        if self.open and events & selectors.EVENT_READ:
            self._receive()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            if error.errno is not None and self._connecting(error):
                return
            return self.close(f"the connection to the peer was lost: {error}")
        self._selector.modify(self._socket, selectors.EVENT_READ, self.ready)

    @staticmethod
    def _connecting(error: OSError) -> bool:

        return error.errno in (errno.ENOTCONN, errno.EINPROGRESS)

    def _receive(self) -> None:
        try:
            some = self._socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            return self.close(f"the connection to the peer was lost: {error}")
        if not some:
            return self.close("the peer has ended or closed its engine")
        self._received += some
        while self.open and len(self._received) >= HEADER_BYTES:
            length = int.from_bytes(self._received[:HEADER_BYTES], "little")
            if length > LONGEST_BYTES:
                return self.close("the peer sent something that is no message")
            if len(self._received) < HEADER_BYTES + length:
                return
            body = bytes(self._received[HEADER_BYTES : HEADER_BYTES + length])
            del self._received[: HEADER_BYTES + length]
            try:
                message = self._decoder.decode(body)
            except msgspec.MsgspecError:
                return self.close("the peer sent something that is no message")
            self._on_message(message)
