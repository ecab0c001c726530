"""Two network namespaces with a wire between them, which stand for two hosts."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

__all__ = ["NoHosts", "two_hosts"]


class NoHosts(Exception):
    """This machine does not let tests have namespaces; the message says why."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of both. Raises NoHosts."""
    names = tuple(f"mcpg{os.getpid()}{end}" for end in "ab")
    with contextlib.ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        ends = [f"mc{os.getpid()}{end}" for end in "ab"]
        _ip(
            "link",
            "add",
            ends[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            names[1],
        )
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            _ip("-n", name, "addr", "add", f"198.18.7.{number}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        raise NoHosts("`ip` is not installed; install iproute2") from None
    except subprocess.CalledProcessError as error:
        raise NoHosts(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from None
