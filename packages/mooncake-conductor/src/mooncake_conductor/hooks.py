"""Hooks a plugin of the conductor implements. A plugin module, all of it::

    from mooncake_conductor.hooks import hookimpl

    class Nearest:
        name = "nearest"
        def place(self, snapshot): ...

    @hookimpl
    def mooncake_conductor_policies():
        return [Nearest()]

It is named by an entry point in the group ``mooncake_conductor.policies``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_conductor.policy.snapshot import Policy
from mooncake_transfer.hooks import hookimpl, hookspec

__all__ = ["hookimpl", "mooncake_conductor_policies"]


@hookspec
def mooncake_conductor_policies() -> Sequence[Policy]:  # type: ignore[empty-body]
    """Offer placement policies. Called once, when a conductor starts."""
