"""What every long-running Mooncake process does alike: say that it is ready, and die with its parent."""

from __future__ import annotations

import logging
import os
import threading

import msgspec

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.log_format import JsonLines, TextLines

__all__ = ["announce_ready", "configure_logging", "watch_lifeline"]

LIFELINE_EXIT_STATUS = 70
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def announce_ready(fd: int | None, message: dict[str, object]) -> None:
    """Write ``message`` as one line of JSON to ``fd`` and close it. Nothing happens when ``fd`` is None.

    A parent that is gone by now is not an error: its lifeline ends this process anyway.
    """
    if fd is None:
        return
    try:
        with os.fdopen(fd, "wb") as pipe:
            pipe.write(msgspec.json.encode(message) + b"\n")
    except BrokenPipeError:
        logging.getLogger(__name__).warning("nobody reads the ready pipe (descriptor %d) any more", fd)


def watch_lifeline(fd: int | None) -> None:
    """End this process at once, with status 70, when the write end of the pipe behind ``fd`` is closed.

    The kernel closes it when the parent dies, however it dies, so no child outlives a killed parent.
    """
    if fd is None:
        return
    threading.Thread(target=_exit_at_eof, args=(fd,), name="lifeline", daemon=True).start()


def _exit_at_eof(fd: int) -> None:
    while os.read(fd, 64):
        pass
    os._exit(LIFELINE_EXIT_STATUS)


def configure_logging(level: str = "INFO", *, json_lines: bool = False) -> None:
    """Log lines of every Mooncake process to standard error, in one format; see ``log_format``.

    Raises ConfigError for a ``level`` that is none; capitals or not is the same.
    """
    if level.upper() not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; use {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if json_lines else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
