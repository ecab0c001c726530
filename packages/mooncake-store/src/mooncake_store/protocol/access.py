"""Saying who one is."""

from __future__ import annotations

from mooncake_store.protocol.base import Reply, Request

__all__ = ["REPLIES", "REQUESTS", "Authenticate"]


class Authenticate(Request, kw_only=True):
    """Show a token; it counts for this connection, and comes before Mount. The answer is Done."""

    token: str


REQUESTS: tuple[type[Request], ...] = (Authenticate,)
REPLIES: tuple[type[Reply], ...] = ()
