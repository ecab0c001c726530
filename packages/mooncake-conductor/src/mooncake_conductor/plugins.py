"""Finds the placement policies that are installed; a broken plugin never stops the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from mooncake_conductor import hooks
from mooncake_conductor._errors import ConfigError
from mooncake_conductor.policy.snapshot import Policy
from mooncake_transfer.plugins import load_plugins

__all__ = ["POLICY_GROUP", "find_policies", "find_policy"]

POLICY_GROUP = "mooncake_conductor.policies"

log = logging.getLogger(__name__)


def find_policies(group: str = POLICY_GROUP) -> dict[str, Policy]:
    """Every installed policy by name; the first of two with one name is kept, in order of plugin names."""
    found: dict[str, Policy] = {}
    for plugin, policy in _offered(group):
        if policy.name in found:
            log.warning(
                "plugin %s offers a second policy named %r; the first one is kept", plugin, policy.name
            )
        else:
            found[policy.name] = policy
    return found


def find_policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError with the names there are."""
    policies = find_policies()
    if name not in policies:
        raise ConfigError(
            f"there is no placement policy {name!r}; installed are {', '.join(sorted(policies))}"
        )
    return policies[name]


def _offered(group: str) -> Iterator[tuple[str, Policy]]:
    manager = load_plugins(group).manager
    manager.add_hookspecs(hooks)
    for name, plugin in sorted(manager.list_name_plugin()):
        hook = getattr(plugin, "mooncake_conductor_policies", None)
        if hook is None:
            continue
        try:
            offered = [policy for policy in hook() if _is_policy(name, policy)]
        except Exception:
            # A third party's code: any failure is its own, and must not stop the others.
            log.warning("plugin %s: mooncake_conductor_policies() failed", name, exc_info=True)
            continue
        for policy in offered:
            yield name, policy


def _is_policy(plugin: str, policy: object) -> bool:
    if isinstance(policy, Policy):
        return True
    log.warning("plugin %s offers %r, which is no policy: it needs a name and a place()", plugin, policy)
    return False
