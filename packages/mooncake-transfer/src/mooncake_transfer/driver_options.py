"""What the options module of every driver does: check a user's options, and write them as strings.

::

    class XOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        workers: int = 0

        def __post_init__(self) -> None:
            check_limits("x", self, {"workers": (0, 64)})

    def render(options: Mapping[str, object]) -> dict[str, str]:
        return as_text(checked("x", XOptions, options))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from mooncake_transfer._errors import ConfigError

__all__ = ["as_text", "check_limits", "checked"]

Options = TypeVar("Options", bound=msgspec.Struct)


def checked(driver: str, kind: type[Options], options: Mapping[str, object]) -> Options:
    """Make a ``kind`` of a user's options. Raises ConfigError that names what is wrong and what is known."""
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ConfigError(
            f"{driver} driver options {dict(options)!r}: {error}; known options: {known}"
        ) from error


def check_limits(driver: str, options: msgspec.Struct, limits: Mapping[str, tuple[float, float]]) -> None:
    """Raise ConfigError for the first option of ``limits`` that is not within its two bounds, inclusive."""
    for name, (least, most) in limits.items():
        value = getattr(options, name)
        if not least <= value <= most:
            raise ConfigError(f"{driver} option {name} is {value}; it must be within {least}..{most}")


def as_text(options: msgspec.Struct, *, without: Collection[str] = ()) -> dict[str, str]:
    """Write every option but those of ``without`` as the string that a compiled core reads."""
    plain = msgspec.structs.asdict(options)
    return {name: _text(value) for name, value in plain.items() if name not in without}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
