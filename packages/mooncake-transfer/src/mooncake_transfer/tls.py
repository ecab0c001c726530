"""Encryption between engines: TLS 1.3 in which both sides prove who they are."""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec

from mooncake_transfer._arguments import check_fields
from mooncake_transfer._core import Channel
from mooncake_transfer._errors import ConfigError

__all__ = ["TlsConfig"]


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who this engine is and whom it believes. Raises ConfigError for names that are empty.

    All engines that talk to each other need it, or none. The files are PEM and are read when the engine
    starts. An engine connects and is connected to, so its certificate must be good for both (extended key
    usage, if any: serverAuth and clientAuth).

    Attributes:
        ca_file: certificates of those who may sign a peer's certificate.
        certificate_file: this engine's certificate, followed by those between it and the CA, if any.
        key_file: its private key, without a pass phrase.
        verify_host: a peer's certificate must be for the host it was looked for at (subject alternative name,
            DNS or IP); False: any certificate of the CA does.
        data: network drivers encrypt too, those that cannot are refused; False: only the channel is
            encrypted, and the bytes of regions travel in plain.
    """

    ca_file: str
    certificate_file: str
    key_file: str
    verify_host: bool = True
    data: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "tls.")
        for name in ("ca_file", "certificate_file", "key_file"):
            if not getattr(self, name):
                raise ConfigError(f"tls.{name} is empty; TLS needs the path of a PEM file")


def secure(channel: Channel, tls: TlsConfig) -> None:
    """Encrypt every connection of the channel from now on. Raises ConfigError, naming the file at fault."""
    for name in ("ca_file", "certificate_file", "key_file"):
        path = Path(getattr(tls, name))
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"tls.{name} cannot be read: {error}") from None
    # Loads the OpenSSL that Python came with, if any; the core then finds it by its name.
    importlib.import_module("ssl")
    channel.use_tls(tls.ca_file, tls.certificate_file, tls.key_file, tls.verify_host)


def driver_options(tls: TlsConfig | None) -> dict[str, str]:
    """Return the options by which a network driver encrypts what it moves; none when it shall not."""
    if tls is None or not tls.data:
        return {}
    return {"tls_ca": tls.ca_file, "tls_certificate": tls.certificate_file, "tls_key": tls.key_file}
