"""How log lines look: for people, or as JSON for machines, with the fields that say what a line is about.

Lines of the engine carry these attributes, set with ``extra=``; a handler of your own finds them on the
record:

========== =====================================================================================
event      what happened: ``rail failed``, ``breaker opened``, ``rail recovered``, ``rail unused`` (it leads
           there for no transfer, as shared memory to another host), ``driver fault`` (the driver broke the
           driver ABI)
peer       channel address of the engine on the other side
rail       driver, local and remote device, as messages of exceptions name it
region     name of the region that was read or written
driver     name of the driver
method     method of ``TransferEngine.serve()`` whose handler is concerned
========== =====================================================================================
"""

from __future__ import annotations

import logging
from datetime import datetime, timezone

import msgspec

__all__ = ["FIELDS", "JsonLines", "TextLines", "fields_of"]

FIELDS = ("event", "peer", "rail", "region", "driver", "method")
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def fields_of(record: logging.LogRecord) -> dict[str, str]:
    """The fields that a record carries; empty ones are left out."""
    found = {name: getattr(record, name, None) for name in FIELDS}
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


class TextLines(logging.Formatter):
    """One line for people: time, level, logger, message, and the fields as ``name=value`` at its end."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Add the fields to the message."""
        fields = [f"{name}={_quoted(value)}" for name, value in fields_of(record).items()]
        return " ".join([super().formatMessage(record), *fields])


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the fields, and ``exception`` if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record."""
        line: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _quoted(value: str) -> str:
    return f'"{value}"' if " " in value else value
