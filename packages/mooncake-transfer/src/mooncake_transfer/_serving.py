"""The threads that run the handlers of one engine's channel."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import msgspec

from mooncake_transfer import _wire
from mooncake_transfer._arguments import callback, method_name, shown
from mooncake_transfer._core import Channel
from mooncake_transfer._errors import ConfigError, PeerError
from mooncake_transfer._scarce import start_thread
from mooncake_transfer.peer import Caller

Reply = bytes | bytearray | memoryview | None
Handler = Callable[[bytes, Caller], Reply]
LostHandler = Callable[[Caller], None]

POLL_S = 1.0
JOIN_S = 5.0
# Of one connection: methods without a handler that are logged, so that no peer can fill the log.
MOST_UNKNOWN = 8
METHOD_SHOWN = 60  # characters of a method, which is the peer's choice

log = logging.getLogger(__name__)


class Dispatcher:
    """Takes what peers ask from the channel and runs the handlers; holds no reference to the engine."""

    def __init__(self, channel: Channel, threads: int):
        self._channel = channel
        self._handlers: dict[str, Handler] = {}
        self._compiled: set[str] = set()
        self._lost_handlers: list[LostHandler] = []
        self._callers: dict[int, Caller] = {}
        self._unknown: dict[int, set[str]] = {}
        self._known = threading.Lock()
        self._stopping = False
        self._request_threads = threads
        self._threads: list[threading.Thread] = []

    def serve(self, method: str, handler: Handler) -> None:
        """Let ``handler`` answer ``method``. Raises ConfigError when another handler already does."""
        method_name(method, "method")
        callback(handler, "handler", "payload, caller")
        if method in self._compiled or self._handlers.setdefault(method, handler) is not handler:
            raise ConfigError(f"method {method!r} already has a handler in this engine")

    def serve_compiled(self, method: str, handler: object) -> None:
        """Let a PyCapsule's function answer ``method``, see ``TransferEngine.serve_compiled``."""
        method_name(method, "method")
        if method in self._handlers:
            raise ConfigError(f"method {method!r} already has a handler in this engine")
        try:
            self._channel.serve_compiled(method, handler)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None
        self._compiled.add(method)

    def serve_own(self, method: str, handler: Handler) -> None:
        """As ``serve``, before ``start``, for a method that is answered also while all threads are busy."""
        self._channel.reserve(method)
        self.serve(method, handler)

    def on_peer_lost(self, handler: LostHandler) -> None:
        """Call ``handler`` for every connection that ends from now on. Raises ConfigError."""
        callback(handler, "handler", "caller")
        self._lost_handlers.append(handler)

    def start(self) -> None:
        """Start the threads. Raises TransferError when there is none left."""
        for loop in [self._run_events, self._run_own_requests] + [self._run_requests] * self._request_threads:
            # Made here: one that never runs would keep what its function belongs to.
            thread = threading.Thread(target=loop, name=f"mooncake-{loop.__name__.strip('_')}", daemon=True)
            start_thread(thread)
            self._threads.append(thread)

    def stop(self) -> None:
        """End the threads; the channel is closed already. A handler that does not return is logged."""
        self._stopping = True
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)
                if thread.is_alive():
                    log.warning("a handler still runs in thread %s after the engine was closed", thread.name)

    def _run_requests(self) -> None:
        connection = 0  # whose next request is probably the next one
        while not self._stopping:
            item = self._channel.next_request(POLL_S, after=connection)
            connection = 0
            if item is not None:
                _, connection, request, method, body = item
                self._answer(connection, request, method, body)

    def _run_own_requests(self) -> None:
        while not self._stopping:
            item = self._channel.next_request(POLL_S, own=True)
            if item is not None:
                _, connection, request, method, body = item
                self._answer(connection, request, method, body)

    def _answer(self, connection: int, request: int, method: str, body: bytes) -> None:
        try:
            reply = self._handler(method)(body, self._caller(connection))
            failed, answer = False, _reply_bytes(reply, method)
        except BaseException as error:  # the caller gets it, and this thread has others to answer
            # What is no Exception (SystemExit, say) was meant for a thread that is not the handler's.
            level = logging.DEBUG if isinstance(error, Exception) else logging.ERROR
            peer, where = self._told_of(connection, method)
            log.log(level, "handler of %s failed for %s", shown(method), peer, exc_info=True, extra=where)
            failed, answer = True, _failure(error)
        try:
            try:
                self._channel.reply(connection, request, failed, answer)
            except ConfigError as error:  # over the limit; the caller is told that
                self._channel.reply(connection, request, True, _failure(error))
        except PeerError as error:
            peer, where = self._told_of(connection, method)
            log.info("the answer to %s for %s is lost: %s", shown(method), peer, error, extra=where)

    def _handler(self, method: str) -> Handler:
        try:
            return self._handlers[method]
        except KeyError:
            raise ConfigError(f"this engine has no handler for {method!r}") from None

    def _caller(self, connection: int) -> Caller:
        # The hello came before the request, but the thread that takes it in may be busy with a notification.
        with self._known:
            if connection not in self._callers:
                self._learn(connection, self._channel.hello_of(connection))
            return self._callers[connection]

    def _told_of(self, connection: int, method: str) -> tuple[str, dict[str, str]]:
        """Who is at the other end, and the fields of a log line about what it asks for."""
        caller = self._callers.get(connection)
        peer = f"connection {connection}" if caller is None else caller.address
        return peer, {"peer": peer, "method": repr(method[:METHOD_SHOWN])[1:-1]}

    def _learn(self, connection: int, body: bytes) -> None:
        hello = msgspec.msgpack.decode(body, type=_wire.Hello)
        self._callers[connection] = Caller(
            connection, hello.address, hello.epoch, self._channel.certificate_of(connection)
        )

    def _run_events(self) -> None:
        while not self._stopping:
            item = self._channel.next_event(POLL_S)
            if item is None:
                continue
            kind, connection, _, method, body = item
            try:
                self._take_event(kind, connection, method, body)
            except BaseException:  # nobody waits for it, and the next event must be handled all the same
                peer, where = self._told_of(connection, method)
                log.exception("handling %s %s of %s failed", kind, shown(method), peer, extra=where)

    def _take_event(self, kind: str, connection: int, method: str, body: bytes) -> None:
        if kind == "hello":
            with self._known:
                self._learn(connection, body)
        elif kind == "refused":
            log.warning("a connection was refused: %s", body.decode(errors="replace"))
        elif kind == "notify":
            if method in self._handlers:
                self._handlers[method](body, self._caller(connection))
            else:
                self._note_unknown(connection, method)
        else:
            self._unknown.pop(connection, None)
            caller = self._callers.pop(connection, None)
            if caller is not None:
                self._tell_lost(caller)

    def _note_unknown(self, connection: int, method: str) -> None:
        """Log a notification that nobody takes: once for each peer and method, and not for ever."""
        known = self._unknown.setdefault(connection, set())
        if method in known or len(known) >= MOST_UNKNOWN:
            return
        known.add(method)
        peer, where = self._told_of(connection, method)
        last = "; of this peer's, no further method is logged" if len(known) == MOST_UNKNOWN else ""
        log.warning("%s notifies %s, which has no handler here%s", peer, shown(method), last, extra=where)

    def _tell_lost(self, caller: Caller) -> None:
        for handler in self._lost_handlers:
            try:
                handler(caller)
            except BaseException:  # nobody waits for it, and the others must learn of it all the same
                where = {"peer": caller.address}
                log.exception("a handler of lost peers failed for %s", caller.address, extra=where)


def _reply_bytes(reply: object, method: str) -> bytes:
    """Return what a handler gave as bytes. Raises TypeError for what is neither bytes nor None."""
    if isinstance(reply, bytes):
        return reply
    if reply is None:
        return b""
    try:
        return bytes(memoryview(reply))  # type: ignore[arg-type]
    except TypeError:
        kind = type(reply).__name__
        raise TypeError(
            f"handler of {shown(method)} returned {kind} {shown(reply)}; it must return bytes or None"
        ) from None


def _failure(error: BaseException) -> bytes:
    try:
        message = str(error)
    except Exception as problem:  # noqa: BLE001 - of the handler's making; its name is told at least
        message = f"its message cannot be had: {type(problem).__name__}"
    return msgspec.msgpack.encode(_wire.Failure(_sendable(type(error).__name__), _sendable(message)))


def _sendable(words: str) -> str:
    return words.encode(errors="backslashreplace").decode()
