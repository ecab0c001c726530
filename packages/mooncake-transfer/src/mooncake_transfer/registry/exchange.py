"""Asks one of several HTTP servers, within a deadline. The HTTP and the etcd registry stand on it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from mooncake_transfer._address import join_address
from mooncake_transfer._errors import RegistryUnavailable
from mooncake_transfer.registry.sockets import Sockets
from mooncake_transfer.registry.url import RegistryUrl

__all__ = ["Answer", "Exchange"]

MAX_ANSWER_BYTES = 256 << 20


class Answer(NamedTuple):
    """What a server said."""

    status: int
    body: bytes


class Exchange:
    """Sends requests to the server that answered last, or else to the next. Thread-safe."""

    def __init__(self, url: RegistryUrl, timeout_s: float, headers: Mapping[str, str] | None = None) -> None:
        scheme = "http" if url.context is None else "https"
        self._bases = [f"{scheme}://{join_address(host, port)}" for host, port in url.endpoints]
        self._where = url.where
        self._timeout_s = timeout_s
        self._good = 0
        self._sockets = Sockets()
        # Proxies and credentials of the user's environment are meant for the web, not for this.
        self._client = httpx.Client(
            verify=url.context if url.context is not None else False,
            headers={"Accept-Encoding": "identity", **(headers or {})},
            trust_env=False,
        )

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask, and take any answer that is no failure of the server. Raises RegistryUnavailable."""
        deadline_s = time.monotonic() + self._timeout_s
        trouble = "it was not asked"
        for turn in range(len(self._bases)):
            index = (self._good + turn) % len(self._bases)
            step_s = (deadline_s - time.monotonic()) / (len(self._bases) - turn)
            if step_s <= 0 or self._sockets.ended:
                break
            request = self._client.build_request(
                method, self._bases[index] + path, params=params, content=content, headers=headers
            )
            try:
                answer = self._ask_twice(request, step_s)
            except httpx.TimeoutException:
                trouble = f"no answer within {step_s:.3g} s"
            except httpx.HTTPError as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                if answer.status < 500:
                    self._good = index
                    return answer
                trouble = f"status {answer.status}: {answer.body[:200].decode(errors='replace')}"
        raise RegistryUnavailable(
            f"registry {self._where} cannot be used ({trouble}); "
            "check that it runs and that address, certificates and password fit"
        )

    def interrupt(self) -> None:
        """End the request in progress, from another thread; no other can be sent afterwards."""
        self._sockets.end()

    def _note_socket(self, event: str, details: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._sockets.add(details["return_value"].get_extra_info("socket"))

    def close(self) -> None:
        """End every connection."""
        self._client.close()

    def _ask_twice(self, request: httpx.Request, step_s: float) -> Answer:
        try:
            return self._ask(request, step_s)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            # Of a connection that was kept: the server may have closed it, or have been restarted, since.
            if self._sockets.ended:
                raise
            return self._ask(request, step_s)

    def _ask(self, request: httpx.Request, step_s: float) -> Answer:
        request.extensions = {"timeout": httpx.Timeout(step_s).as_dict(), "trace": self._note_socket}
        deadline_s = time.monotonic() + step_s
        response = self._client.send(request, stream=True)
        try:
            body = bytearray()
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > deadline_s:
                    raise httpx.ReadTimeout("the answer does not end")
        finally:
            response.close()
        return Answer(response.status_code, bytes(body))
