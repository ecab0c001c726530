"""One lane of a connection: frames in and out of a socket that never blocks."""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Callable

from mooncake_ep.pg.wire.frames import HEADER, Header, Lane

__all__ = ["TURN_BYTES", "Stream"]

_BUFFER_BYTES = 64 << 10
TURN_BYTES = 4 << 20  # read of one stream before the others have their turn
_AT_ONCE = 16  # frames given to the system in one call
_DIRECT_BYTES = 16 << 10  # from here on a payload is read to where it belongs


class Stream:
    """The sending and the receiving half. `ended`: nothing more will come."""

    def __init__(self, connection: socket.socket, rank: int, lane: Lane) -> None:
        self.connection, self.rank, self.lane = connection, rank, lane
        self.ended = False
        self.waits = False  # for the engine to say where the payload goes
        self._out: deque[list[memoryview]] = deque()  # what is left of each frame
        self._begun = False  # part of the first one has left
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._head: Header | None = None
        self._payload: memoryview | None = None
        self._done = 0

    # Out.

    @property
    def sending(self) -> bool:
        """Whether something has not left yet."""
        return bool(self._out)

    def send(self, head: bytes, payload: memoryview | bytes) -> None:
        """Send, or keep what the system does not take now. Raises OSError."""
        frame = [memoryview(head)]
        if len(payload):
            frame.append(memoryview(payload))
        self._out.append(frame)
        if len(self._out) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what is kept, as far as it goes. Raises OSError."""
        while self._out:
            pieces = [piece for frame in itertools.islice(self._out, _AT_ONCE) for piece in frame]
            try:
                sent = self.connection.sendmsg(pieces)
            except BlockingIOError:
                return
            while sent:
                frame = self._out[0]
                self._begun = True
                part = min(sent, len(frame[0]))
                sent -= part
                frame[0] = frame[0][part:]
                if not frame[0]:
                    frame.pop(0)
                if not frame:
                    self._out.popleft()
                    self._begun = False

    def retract(self) -> None:
        """Forget the frames that have not begun to leave; keep a copy of the rest of one that has."""
        rest = [memoryview(bytes(piece)) for piece in self._out[0]] if self._begun else None
        self._out.clear()
        if rest is not None:
            self._out.append(rest)

    # In.

    def read(
        self,
        place: Callable[[int, Lane, Header], memoryview | None],
        arrived: Callable[[int, Lane, Header, memoryview], None],
    ) -> int:
        """Take what has come, up to one turn; returns the bytes. Sets `ended` and `waits`. Raises OSError."""
        taken = 0
        while taken < TURN_BYTES and not self.ended:
            if self._payload is None and not self._begin_frame(place):
                if self.waits:
                    return taken
                got = self._fill()
            elif self._payload is not None and self._done < len(self._payload):
                got = self._fill_payload()
            else:
                head, payload = self._head, self._payload
                assert head is not None
                assert payload is not None
                self._head = self._payload = None
                arrived(self.rank, self.lane, head, payload)
                continue
            if got < 0:
                return taken
            taken += got
        return taken

    def divert(self, sink: memoryview) -> None:
        """Have the rest of the payload that is coming in go elsewhere."""
        if self._payload is not None:
            self._payload = sink[: len(self._payload)]

    def _begin_frame(self, place: Callable[[int, Lane, Header], memoryview | None]) -> bool:
        if self._head is None:
            if self._end - self._begin < HEADER.size:
                return False
            self._head = Header(*HEADER.unpack_from(self._buffer, self._begin))
            self._begin += HEADER.size
        self._payload = place(self.rank, self.lane, self._head)
        self.waits = self._payload is None
        self._done = 0
        return not self.waits

    def _fill(self) -> int:
        """Read into the buffer; -1: there is nothing now."""
        left = self._end - self._begin
        if left and self._begin:
            self._view[:left] = bytes(self._view[self._begin : self._end])
        self._begin, self._end = 0, left
        return self._receive(self._view[left:], buffered=True)

    def _fill_payload(self) -> int:
        assert self._payload is not None
        rest = self._payload[self._done :]
        ready = min(self._end - self._begin, len(rest))
        if ready:
            rest[:ready] = self._view[self._begin : self._begin + ready]
            self._begin += ready
            self._done += ready
            return 0
        if len(rest) < _DIRECT_BYTES:
            return self._fill()
        return self._receive(rest, buffered=False)

    def _receive(self, into: memoryview, *, buffered: bool) -> int:
        try:
            got = self.connection.recv_into(into)
        except BlockingIOError:
            return -1
        if got == 0:
            self.ended = True
        elif buffered:
            self._end += got
        else:
            self._done += got
        return got
