"""Checks of arguments: what is of the wrong type is told by its name, what it is and what it must be."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Collection
from typing import Any, TypeVar, get_type_hints

import msgspec

from mooncake_transfer._errors import ConfigError

__all__ = [
    "callback",
    "called_method",
    "check_fields",
    "flag",
    "instance",
    "method_name",
    "number",
    "one_of",
    "payload",
    "region_name",
    "seconds",
    "shown",
    "text",
    "wrong",
]

SHOWN = 60  # characters of a value
REGION_NAME_BYTES = 255  # every descriptor carries it; engine names have as many
METHOD_BYTES = 0xFFFF  # what a frame of the channel has room for

Kind = TypeVar("Kind")


def shown(value: object) -> str:
    """A value for a message: its first characters, and its type where they do not tell it."""
    try:
        written = repr(value)
    except ValueError:  # an integer of thousands of digits
        written = "beyond what can be shown"
    written = written if len(written) <= SHOWN else written[:SHOWN] + "..."
    known = value is None or isinstance(value, str | int | float | bytes | tuple | list | dict)
    return written if known else f"{written} ({type(value).__name__})"


def wrong(name: str, value: object, expected: str) -> ConfigError:
    """Make the error that says so."""
    return ConfigError(f"{name} is {shown(value)}; it must be {expected}")


def seconds(value: object, name: str) -> float:
    """Return ``value`` as a number of seconds. Raises ConfigError for what is none, negative or nan."""
    try:
        amount = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        amount = -1.0
    if isinstance(value, str) or not amount >= 0:
        raise wrong(name, value, "a number of seconds, 0 or more")
    return amount


def number(value: object, name: str, *, least: int | None = None, most: int | None = None) -> int:
    """Return ``value`` as an integer; any kind of integer will do, numpy's too. Raises ConfigError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong(name, value, "an integer") from None
    if least is not None and integer < least:
        raise wrong(name, value, f"{least} or more")
    if most is not None and integer > most:
        raise wrong(name, value, f"at most {most}")
    return integer


def text(value: object, name: str, example: str = "") -> str:
    """Return ``value``, which must be a str that UTF-8 can encode, without NUL. Raises ConfigError."""
    if not isinstance(value, str):
        raise wrong(name, value, f"text (str){', for example ' + repr(example) if example else ''}")
    _encoded(value, name)
    return value


def _encoded(value: str, name: str) -> bytes:
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise wrong(name, value, "text that UTF-8 can encode") from None
    if b"\0" in encoded:
        raise wrong(name, value, "text without the character NUL")
    return encoded


def method_name(value: object, name: str) -> str:
    """Return ``value``, which must be text that a message has room for as its method. Raises ConfigError."""
    method = text(value, name, "cache.fetch")
    if len(method) > METHOD_BYTES // 4 and (size := len(method.encode())) > METHOD_BYTES:
        raise wrong(name, method, f"at most {METHOD_BYTES} bytes long; it has {size}")
    return method


def region_name(value: object, name: str) -> str:
    """Return ``value``, which must be the name of a region: text of up to 255 bytes. Raises ConfigError."""
    given = text(value, name, "kv-pool")
    if (size := len(given.encode())) > REGION_NAME_BYTES:
        raise wrong(name, given, f"at most {REGION_NAME_BYTES} bytes long; it has {size}")
    return given


@functools.lru_cache(maxsize=256)
def _known_method(method: str) -> str:
    return method_name(method, "method")


def called_method(value: object) -> str:
    """As ``method_name``, quick for a name that was checked before: callers use few."""
    return _known_method(value) if type(value) is str else method_name(value, "method")


def payload(value: object, name: str, source: str = "") -> bytes:
    """Return ``value``, which must be bytes; ``source`` says what makes them. Raises ConfigError."""
    if not isinstance(value, bytes):
        raise wrong(name, value, f"bytes{', as ' + source + ' returns' if source else ''}")
    return value


def flag(value: object, name: str) -> bool:
    """Return ``value``, which must be True or False. Raises ConfigError."""
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")
    return value


def one_of(value: object, name: str, choices: Collection[str]) -> str:
    """Return ``value``, which must be one of a few words. Raises ConfigError."""
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        raise wrong(name, value, f"{', '.join(others)} or {last}")
    return value


def callback(value: object, name: str, arguments: str) -> None:
    """Raise ConfigError for what cannot be called."""
    if not callable(value):
        raise wrong(name, value, f"a function that takes ({arguments})")


def instance(value: object, kind: type[Kind], name: str, source: str) -> Kind:
    """Return ``value``, which must be a ``kind``; ``source`` says where one is from. Raises ConfigError."""
    if not isinstance(value, kind):
        raise wrong(name, value, f"a {kind.__name__}, {source}")
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def check_fields(settings: msgspec.Struct, prefix: str = "") -> None:
    """Raise ConfigError for the first field of the wrong type, which msgspec checks only when it decodes.

    What means the same is taken as what it must be: a list for a tuple, a path for its text.
    """
    kind = type(settings)
    for name, hint in _hints(kind).items():
        value = getattr(settings, name)
        plain: object = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            taken = msgspec.convert(plain, hint, strict=True)
        except msgspec.ValidationError as error:
            expected = kind.__annotations__[name]
            raise ConfigError(
                f"{prefix}{name} is {shown(value)}; it must be of type {expected} ({error})"
            ) from None
        _check_texts(taken, f"{prefix}{name}")
        if taken is not value:
            msgspec.structs.force_setattr(settings, name, taken)


def _check_texts(value: object, name: str) -> None:
    """Raise ConfigError for text in a setting, or in what it holds, that the core cannot be told."""
    if isinstance(value, str):
        _encoded(value, name)
    elif isinstance(value, tuple | list):
        for one in value:
            _check_texts(one, name)
    elif isinstance(value, dict):
        for key, one in value.items():
            _check_texts(key, name)
            _check_texts(one, f"{name}[{key!r}]")
