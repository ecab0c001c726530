"""Puts settings together from a file, the environment and arguments, and remembers where each came from."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import msgspec

from mooncake_transfer._errors import ConfigError

__all__ = ["Settings", "flatten", "from_environment", "from_toml"]

FREE_FORM = "driver_options"  # whose keys are the drivers' own
LISTS = frozenset({"drivers", "port_range"})
TABLE = "transfer"


class Settings:
    """Values by field, later layers over earlier ones; ``origins`` says by dotted path what set each."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self._kind = kind

    def add(self, values: Mapping[str, Any], origin: str) -> None:
        """Put a layer on top. Raises ConfigError for a key that is no setting, with the nearest that is."""
        _check_keys(values, self._kind, "", origin)
        _merge(self.values, values)
        for path, _ in flatten(values):
            self.origins[path] = origin


def from_toml(text: bytes, origin: str) -> dict[str, Any]:
    """The ``[transfer]`` table of a file that other packages' tables may share. Raises ConfigError."""
    try:
        tables: dict[str, Any] = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{origin} is no TOML: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{origin}: {name!r} stands outside a table; put it below [{TABLE}]")
        if name != TABLE and difflib.get_close_matches(name, [TABLE]):
            raise ConfigError(f"{origin}: unknown table [{name}]; did you mean [{TABLE}]?")
    found: dict[str, Any] = tables.get(TABLE, {})
    return found


def from_environment(environment: Mapping[str, str], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each variable that starts with ``prefix``, with what it sets; two underscores lead into a table."""
    for name, text in sorted(environment.items()):
        if not name.startswith(prefix):
            continue
        *tables, key = name[len(prefix) :].lower().split("__")
        value: Any = text
        if not tables and key in LISTS:
            value = [part.strip() for part in text.split(",") if part.strip()]
        elif tables[:1] == [FREE_FORM]:
            value = _plain(text)
        nested: dict[str, Any] = {key: value}
        for table in reversed(tables):
            nested = {table: nested}
        yield name, nested


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted path; of tables, what they hold."""
    for key, value in values.items():
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(text: str) -> str | int | float | bool:
    """A driver checks its options itself, and takes numbers as numbers."""
    try:
        return msgspec.json.decode(text, type=int | float | bool)
    except msgspec.MsgspecError:
        return text


def _check_keys(values: Mapping[str, Any], kind: type[msgspec.Struct], prefix: str, origin: str) -> None:
    for key, value in values.items():
        if key not in kind.__struct_fields__:
            near = difflib.get_close_matches(key, kind.__struct_fields__, 1, 0.5)
            hint = f"did you mean {prefix + near[0]!r}?" if near else "`mooncake config show` lists all"
            raise ConfigError(f"{origin}: unknown setting {prefix + key!r}; {hint}")
        inner = _struct_of(kind, key)
        if inner is not None and isinstance(value, Mapping):
            _check_keys(value, inner, f"{prefix}{key}.", origin)


def _struct_of(kind: type[msgspec.Struct], field: str) -> type[msgspec.Struct] | None:
    hint = get_type_hints(kind)[field]
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option
    return None


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = _copy(value)


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
