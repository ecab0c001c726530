"""Asks an etcd cluster, version 3.4 or later, by its JSON gateway: endpoints, TLS, users and their tokens."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from mooncake_transfer._errors import ConfigError, RegistryUnavailable
from mooncake_transfer.registry.exchange import Answer, Exchange
from mooncake_transfer.registry.url import RegistryUrl

__all__ = ["DEFAULT_PORT", "NOT_FOUND", "EtcdClient", "EtcdRefused", "as_text"]

DEFAULT_PORT = 2379
# Of gRPC, as the gateway reports them.
NOT_FOUND, UNAUTHENTICATED = 5, 16
AUTH_IS_OFF = "authentication is not enabled"

log = logging.getLogger(__name__)


class EtcdRefused(RegistryUnavailable):
    """The cluster answered, with an error; ``code`` is gRPC's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class EtcdClient:
    """One client of one cluster. Thread-safe; connects when it is first used, and again after a loss.

    Attributes:
        where: the URL as messages show it, without the password.
    """

    def __init__(self, url: RegistryUrl, timeout_s: float) -> None:
        """Raises ConfigError when of user and password only one is there."""
        if bool(url.username) != bool(url.password):
            raise ConfigError(f"registry {url.where} needs both user and password, or neither")
        self.where = url.where
        self._exchange = Exchange(url, timeout_s)
        self._user = url.username
        self._password = url.password
        self._token: str | None = None
        self._authenticated = not url.username

    def interrupt(self) -> None:
        """End the question in progress, from another thread; no other can be asked afterwards."""
        self._exchange.interrupt()

    def close(self) -> None:
        """End every connection."""
        self._exchange.close()

    def ask(self, path: str, question: Mapping[str, object]) -> dict[str, Any]:
        """The answer to one question. Raises RegistryUnavailable; EtcdRefused when the cluster says no."""
        if not self._authenticated:
            self._authenticate()
        try:
            return self._send(path, question)
        except EtcdRefused as error:
            if error.code != UNAUTHENTICATED or not self._user:
                raise
        except RegistryUnavailable:
            # A token names the moment it was given at, in the cluster's own counting. A cluster that was set
            # up anew waits for that moment before it answers, so the next question comes with a new token.
            self._authenticated = not self._user
            raise
        self._authenticate()  # tokens run out, and a restarted cluster knows none
        return self._send(path, question)

    def _authenticate(self) -> None:
        self._token = None
        try:
            answer = self._send("/v3/auth/authenticate", {"name": self._user, "password": self._password})
            self._token = answer["token"]
        except EtcdRefused as error:
            if AUTH_IS_OFF not in str(error):
                raise
            # So it is after a cluster lost everything, users included.
            log.warning("registry %s asks nobody for a password; %r goes on without", self.where, self._user)
        self._authenticated = True

    def _send(self, path: str, question: Mapping[str, object]) -> dict[str, Any]:
        token = self._token
        answer = self._exchange.send(
            "POST",
            path,
            content=msgspec.json.encode(question),
            headers={"Authorization": token} if token else None,
        )
        return self._decode(path, answer)

    def _decode(self, path: str, answer: Answer) -> dict[str, Any]:
        try:
            body = msgspec.json.decode(answer.body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise RegistryUnavailable(
                f"registry {self.where} answers {path} with status {answer.status} and no JSON ({error}); "
                "its JSON gateway (etcd 3.4 or later, --enable-grpc-gateway) is needed"
            ) from None
        if answer.status == 200 and "error" not in body:
            return body
        reason = body.get("message") or body.get("error")
        raise EtcdRefused(
            f"registry {self.where} refuses {path}: {reason}; check user, password and permissions",
            int(body.get("code", 0)),
        )


def as_text(data: bytes) -> str:
    """Keys and values as the gateway takes them."""
    return base64.b64encode(data).decode()
