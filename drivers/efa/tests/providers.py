"""Which of libfabric's providers this machine has for tests, and under which names."""

from __future__ import annotations

import ctypes
import functools

import pytest

__all__ = ["IMPATIENT", "OVER_SHM", "OVER_TCP", "needs_libfabric"]

Options = dict[str, "str | int | float | bool"]


@functools.cache
def _version() -> tuple[int, int] | None:
    try:
        number = ctypes.CDLL("libfabric.so.1").fi_version()
    except OSError:
        return None
    return number >> 16, number & 0xFFFF


def _tcp() -> str:
    # What is called tcp from 1.18 on is net in 1.17, whose own tcp crashes when an endpoint is closed under
    # operations (its ofi_rxm reads the context, which is null, of what was cancelled).
    version = _version()
    return "net;ofi_rxm" if version is not None and version < (1, 18) else "tcp;ofi_rxm"


needs_libfabric = pytest.mark.skipif(
    _version() is None, reason="libfabric.so.1 is not installed (Debian: libfabric1)"
)
# A peer that is lost shows within 15 s, with two attempts to reach it again.
PATIENCE: Options = {"connect_timeout_s": 3.0, "dead_peer_timeout_s": 4.0}
# Fewer endpoints than peers, so that some share them: the other half of the driver's ways.
OVER_TCP: Options = {"provider": _tcp(), "domain": "lo", "endpoints": 16, **PATIENCE}
OVER_SHM: Options = {"provider": "shm", "endpoints": 4, **PATIENCE}
# A lost peer shows within 5 s.
IMPATIENT: Options = {"connect_timeout_s": 1.0, "dead_peer_timeout_s": 2.0}
