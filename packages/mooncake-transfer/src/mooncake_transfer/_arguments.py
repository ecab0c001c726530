"""Checks of arguments that many methods take."""

from __future__ import annotations

from mooncake_transfer._errors import ConfigError


def seconds(value: object, name: str) -> float:
    """Return ``value`` as a number of seconds. Raises ConfigError for what is none, negative or nan."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, str) or not number >= 0:
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds, 0 or more")
    return number
