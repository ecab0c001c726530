"""Takes the URL of a registry apart: ``scheme://[user:password@]host[:port][,host...][/path][?ca=...]``."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from mooncake_transfer._address import join_address, split_address
from mooncake_transfer._errors import ConfigError

__all__ = ["RegistryUrl", "parse_url"]

TLS_OPTIONS = frozenset({"ca", "cert", "key"})
SECRET_FILE = "password_file"


@dataclass(frozen=True, slots=True)
class RegistryUrl:
    """The parts of a registry's URL.

    Attributes:
        where: the URL without its password, for messages.
        endpoints: host and port of every server named.
        username: empty when there is none.
        password: from the URL or the file that ``?password_file=`` names; empty when there is none.
        path: without its first slash.
        tls: the files ``ca``, ``cert`` and ``key``, where given.
        context: verifies the server's name and certificate; None without TLS.
    """

    where: str
    endpoints: tuple[tuple[str, int], ...]
    username: str
    password: str
    path: str
    tls: dict[str, str]
    context: ssl.SSLContext | None


def parse_url(url: str, *, default_port: int, secure: bool) -> RegistryUrl:
    """Check and split ``url``. ``secure`` schemes take the files ``ca``, ``cert`` and ``key`` as options.

    Raises ConfigError for anything malformed, unknown options and files that cannot be read.
    """
    scheme, _, rest = url.partition("://")
    userinfo, at, rest = rest.rpartition("@")
    where = f"{scheme}://{unquote(userinfo.partition(':')[0]) + '@' if at else ''}{rest.partition('?')[0]}"
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise ConfigError(f"registry {where}: {error}") from None
    unknown = set(options) - ({SECRET_FILE} | TLS_OPTIONS if secure else {SECRET_FILE})
    if unknown:
        hint = f"; {scheme}s:// takes them" if unknown <= TLS_OPTIONS else ""
        raise ConfigError(f"registry {where} has unknown options {', '.join(sorted(unknown))}{hint}")
    endpoints = tuple(_endpoint(text, default_port, where) for text in parts.netloc.split(","))
    username, _, password = (unquote(part) for part in userinfo.partition(":"))
    if SECRET_FILE in options:
        password = _read_secret(options.pop(SECRET_FILE), where)
    context = _context(options, where) if secure else None
    return RegistryUrl(where, endpoints, username, password, parts.path.lstrip("/"), options, context)


def _endpoint(text: str, default_port: int, where: str) -> tuple[str, int]:
    bare_v6 = text.startswith("[") and text.endswith("]")
    if text and (":" not in text or bare_v6):
        text = join_address(text.strip("[]"), default_port)
    try:
        return split_address(text)
    except ConfigError as error:
        raise ConfigError(f"registry {where}: {error}") from None


def _read_secret(file: str, where: str) -> str:
    try:
        secret = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"registry {where}: its password file cannot be read: {error}") from None
    if not secret:
        raise ConfigError(f"registry {where}: its password file {file} is empty")
    return secret


def _context(options: dict[str, str], where: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
        elif "key" in options:
            raise ConfigError(f"registry {where} has a key and no cert; give both")
    except OSError as error:  # ssl.SSLError is one too
        raise ConfigError(
            f"registry {where}: the certificates {', '.join(options.values()) or 'of this machine'} "
            f"cannot be used: {error}"
        ) from None
    return context
