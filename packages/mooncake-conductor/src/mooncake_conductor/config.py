"""Configuration of a conductor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from mooncake_conductor._errors import ConfigError

__all__ = ["ConductorConfig", "load_config", "worker_url"]

ENVIRONMENT_PREFIX = "MOONCAKE_CONDUCTOR_"


class ConductorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one conductor. Raises ConfigError for values that cannot work.

    Attributes:
        host: address to serve on.
        port: port of the gateway; 0 takes any free one.
        workers: base URLs of the workers known from the start; others join by ``POST /register``.
        policy: name of the placement policy.
        connect_timeout_s: how long connecting to a worker may take.
        tokenize_timeout_s: how long a worker may take to tokenise a prompt.
        prefill_timeout_s: how long a prefill may take, its queue included.
        first_token_timeout_s: how long a decode worker may take to fetch the KV cache and send the first
            token.
        idle_timeout_s: longest silence inside a stream before the decode worker counts as lost.
        answer_timeout_s: how long a whole answer that is not streamed may take.
        probe_interval_s: pause between two health probes of a worker.
        probe_timeout_s: how long a worker may take to answer a probe.
        silence_limit_s: a worker that answers no probe for so long is down, and what waits for it is given
            up.
        retry_after_s: what a client is told when no worker can serve it.
        replay_timeout_s: longest wait for the next message of an event replay.
        replay_interval_s: pause between two questions for events that were missed without a visible gap.
        body_limit_bytes: largest request body that is read.
        shutdown_timeout_s: how long running requests may go on after a signal to end.
    """

    host: str = "127.0.0.1"
    port: int = 0
    workers: tuple[str, ...] = ()
    policy: str = "cache_aware"
    connect_timeout_s: float = 2.0
    tokenize_timeout_s: float = 10.0
    prefill_timeout_s: float = 120.0
    first_token_timeout_s: float = 30.0
    idle_timeout_s: float = 5.0
    answer_timeout_s: float = 600.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 2.0
    silence_limit_s: float = 10.0
    retry_after_s: float = 2.0
    replay_timeout_s: float = 2.0
    replay_interval_s: float = 2.0
    body_limit_bytes: int = 32 << 20
    shutdown_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is outside 0..65535; use 0 for any free port")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith(("_s", "_bytes")) and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be positive")
        for url in self.workers:
            worker_url(url)


def worker_url(text: str) -> str:
    """The base URL of a worker in its one spelling. Raises ConfigError when it is none."""
    try:
        parts = urlsplit(text.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"{text!r} is not the URL of a worker; write it like http://127.0.0.1:8100")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def load_config(
    overrides: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> ConductorConfig:
    """Defaults, then ``MOONCAKE_CONDUCTOR_<FIELD>`` variables, then ``overrides`` (those that are not None).

    Raises ConfigError for an unknown variable or field, and for a value of the wrong type. ``workers`` is a
    list separated by commas in the environment.
    """
    values: dict[str, object] = {}
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(ENVIRONMENT_PREFIX):
            field = name[len(ENVIRONMENT_PREFIX) :].lower()
            values[field] = tuple(filter(None, text.split(","))) if field == "workers" else text
    values.update({name: value for name, value in overrides.items() if value is not None})
    try:
        return msgspec.convert(values, ConductorConfig, strict=False)
    except ConfigError:
        raise
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration of the conductor: {error}") from error
