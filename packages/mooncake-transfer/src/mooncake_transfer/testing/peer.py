"""A peer as a process of its own, driven by JSON: ``python -m mooncake_transfer.testing.peer CONFIG FD``.

CONFIG is a TransferConfig as JSON, FD the read end of a pipe: when its other end is closed, this process
ends, so it never outlives its test. Each line on standard input is ``{"do": command, ...arguments}`` and gets
one line on standard output, ``{"result": ...}`` or ``{"error": [type, message]}``. The first line out says
where it listens.
"""

from __future__ import annotations

import base64
import json
import logging
import sys
from typing import Any

import msgspec

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError
from mooncake_transfer.process import watch_lifeline
from mooncake_transfer.testing.owner import RegionOwner

__all__ = ["main"]

log = logging.getLogger(__name__)


def _allocate(owner: RegionOwner, nbytes: int, seed: int, kind: str) -> Any:
    region = owner.allocate(nbytes, seed, kind)
    return [region.number, base64.b64encode(region.descriptor).decode()]


def _write(
    owner: RegionOwner, number: int, descriptor: str, blocks: list[list[int]], timeout_s: float
) -> None:
    owner.write(number, base64.b64decode(descriptor), blocks, timeout_s)


def _read(
    owner: RegionOwner, number: int, descriptor: str, blocks: list[list[int]], timeout_s: float
) -> None:
    owner.read(number, base64.b64decode(descriptor), blocks, timeout_s)


def _grant(owner: RegionOwner, number: int, access: str) -> str:
    return base64.b64encode(owner.grant(number, access)).decode()


def _revoke(owner: RegionOwner, number: int, descriptor: str, timeout_s: float) -> None:
    owner.revoke(number, base64.b64decode(descriptor), timeout_s)


COMMANDS: dict[str, Any] = {
    "allocate": _allocate,
    "digest": RegionOwner.digest,
    "fill": RegionOwner.fill,
    "close_region": RegionOwner.close_region,
    "grant": _grant,
    "revoke": _revoke,
    "write": _write,
    "read": _read,
    "listen": RegionOwner.listen,
    "told": RegionOwner.told,
    "clear": RegionOwner.clear,
}


def _answer(owner: RegionOwner, line: str) -> dict[str, Any]:
    request = json.loads(line)
    command = COMMANDS[request.pop("do")]
    try:
        return {"result": command(owner, **request)}
    except TransferError as error:
        log.info("%s", error)
        return {"error": [type(error).__name__, str(error)]}


def main(config_json: str, lifeline_fd: int) -> None:
    """Serve commands until standard input ends."""
    watch_lifeline(lifeline_fd)
    config = msgspec.json.decode(config_json, type=TransferConfig)
    with TransferEngine(config) as engine:
        owner = RegionOwner(engine)
        _say({"result": engine.address})
        for line in sys.stdin:
            _say(_answer(owner, line))


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
