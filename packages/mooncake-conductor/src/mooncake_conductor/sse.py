"""Server-sent events as OpenAI streams use them: ``data:`` lines, a blank line after each event, ``[DONE]``
last."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

__all__ = [
    "DONE",
    "EVENT_LIMIT_BYTES",
    "EventSplitter",
    "as_event",
    "is_preamble",
    "json_event",
    "read_event",
]

DONE = b"[DONE]"
EVENT_LIMIT_BYTES = 16 << 20


class EventSplitter:
    """Cuts a byte stream into the data of its events. Comments and fields other than ``data`` are dropped.
    Pure."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of every event that is complete with these bytes. Raises ValueError when one grows past 16
        MiB."""
        self._pending += received
        if b"\r" in self._pending:
            # A lone CR at the end may be half of a CRLF: leave it for the next bytes.
            keep = b"\r" if self._pending.endswith(b"\r") else b""
            self._pending = self._pending[: len(self._pending) - len(keep)].replace(b"\r\n", b"\n") + keep
        *complete, self._pending = self._pending.split(b"\n\n")
        if len(self._pending) > EVENT_LIMIT_BYTES:
            raise ValueError(f"an event is longer than {EVENT_LIMIT_BYTES} bytes")
        for block in complete:
            lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


def as_event(data: bytes) -> bytes:
    """The wire form of an event."""
    return b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def json_event(value: object) -> bytes:
    """The wire form of an event that carries ``value`` as JSON."""
    return as_event(msgspec.json.encode(value))


def read_event(data: bytes) -> dict[str, object]:
    """The JSON object in an event; empty for anything else, such as ``[DONE]``."""
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def is_preamble(chunk: dict[str, object]) -> bool:
    """Whether a chunk opens a chat answer without any token of it: only the role, and empty content."""
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(
        isinstance(choice, dict)
        and choice.get("finish_reason") is None
        and isinstance(choice.get("delta"), dict)
        and "role" in choice["delta"]
        and not any(value for key, value in choice["delta"].items() if key != "role")
        for choice in choices
    )
