"""Exceptions of mooncake_transformers.demo.

::

    DemoError
    ├─ RequestFailed
    └─ StreamBroken
"""

from __future__ import annotations


class DemoError(Exception):
    """Base of what can go wrong while the demo talks to the cluster."""


class RequestFailed(DemoError):
    """The gateway refused the request; the message has its status and its reason."""


class StreamBroken(DemoError):
    """The answer's stream ended early or carried an error; the message has the reason."""
