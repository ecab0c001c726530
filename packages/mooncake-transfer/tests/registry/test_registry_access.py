"""Registries behind TLS, tokens, passwords and permissions, on real servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import RegistryUnavailable
from mooncake_transfer.registry import Registry, open_registry
from mooncake_transfer.registry.records import engine_key
from mooncake_transfer.testing.certificates import make_tls
from mooncake_transfer.testing.fixtures import wait_until
from mooncake_transfer.testing.registry_servers import (
    RegistryServer,
    TlsFiles,
    etcd_server,
    metadata_server,
    redis_server,
)

PASSWORD = "pa:s/s@w?rd%25#"
TOKEN = "t0ken-of-the-cluster"
TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_tls(tmp_path_factory.mktemp("tls") / "good")


@pytest.fixture(scope="module")
def other_tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_tls(tmp_path_factory.mktemp("tls") / "other")


GUARDED: dict[str, Callable[[Path], RegistryServer]] = {
    "http": lambda folder: metadata_server(folder, token=TOKEN),
    "etcd": lambda folder: etcd_server(folder, password=PASSWORD),
    "redis": lambda folder: redis_server(folder, password=PASSWORD),
    "redis-acl": lambda folder: redis_server(folder, user="mooncake", password=PASSWORD),
}
ENCRYPTED: dict[str, Callable[[Path, TlsFiles], RegistryServer]] = {
    "http": lambda folder, tls: metadata_server(folder, token=TOKEN, tls=tls),
    "etcd": lambda folder, tls: etcd_server(folder, tls=tls),
    "redis": lambda folder, tls: redis_server(folder, password=PASSWORD, tls=tls),
}


def find_each_other(url: str) -> None:
    """Two engines meet by name in the registry."""
    config = TransferConfig(registry=url, name="owner", registry_timeout_s=TIMEOUT_S)
    with (
        TransferEngine(config) as owner,
        TransferEngine(TransferConfig(registry=url, registry_timeout_s=TIMEOUT_S)) as reader,
    ):
        owner.publish(owner.allocate(4096, name="kv"))
        assert reader.find_region("owner/kv").nbytes == 4096


def refused(url: str) -> str:
    """What the registry, asked at ``url``, says instead of an answer."""
    with closing(open_registry(url, TIMEOUT_S)) as registry, pytest.raises(RegistryUnavailable) as caught:
        registry.get(engine_key("a"))
    return str(caught.value)


@pytest.mark.parametrize("kind", sorted(GUARDED))
def test_a_password_lets_in_and_nothing_else_does(
    kind: str, tmp_path: Path, require_program: Callable[[str], None]
) -> None:
    require_program(kind.partition("-")[0])
    secret = TOKEN if kind == "http" else PASSWORD
    with GUARDED[kind](tmp_path) as server:
        find_each_other(server.url)
        scheme, rest = server.url.split("://")
        user, address = rest.rpartition("@")[::2]
        name = user.partition(":")[0]
        file = tmp_path / "secret.txt"
        file.write_text(f"{secret}\n")
        find_each_other(f"{scheme}://{name + '@' if name else ''}{address}?password_file={file}")
        for url in (f"{scheme}://{address}", f"{scheme}://{name}:wr0ng@{address}"):
            message = refused(url)
            assert "password" in message or "token" in message
            assert "wr0ng" not in message
            assert address in message


@pytest.mark.parametrize("kind", sorted(ENCRYPTED))
def test_certificates_are_checked_at_both_ends(
    kind: str, tmp_path: Path, tls: TlsFiles, other_tls: TlsFiles, require_program: Callable[[str], None]
) -> None:
    require_program(kind)
    with ENCRYPTED[kind](tmp_path, tls) as server:
        find_each_other(server.url)
        plain, _, _ = server.url.partition("?")
        for options in (
            "",
            f"?ca={other_tls.ca}&cert={tls.cert}&key={tls.key}",
            f"?ca={tls.ca}",
            f"?ca={tls.ca}&cert={other_tls.cert}&key={other_tls.key}",
        ):
            assert "certificates" in refused(plain + options)
        assert plain.partition("@")[2] in refused(plain.replace("s://", "://", 1))


def test_an_etcd_that_lost_its_users_too_is_used_without_a_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, require_program: Callable[[str], None]
) -> None:
    require_program("etcd")
    with GUARDED["etcd"](tmp_path) as server, closing(open_registry(server.url, 1.0)) as registry:
        assert registry.replace(engine_key("a"), None, b"1", 60.0)
        server.kill()
        server._prepare = lambda: None
        server.start()
        wait_until(lambda: _takes(registry, "a"), "entries are taken again", timeout_s=60.0)
        assert "goes on without" in caplog.text


def _takes(registry: Registry, name: str) -> bool:
    try:
        return registry.replace(engine_key(name), None, b"1", 60.0)
    except RegistryUnavailable:
        return False  # as an announcer does: the next try follows


def test_the_next_server_of_an_etcd_cluster_is_asked_when_one_is_gone(
    tmp_path: Path, require_program: Callable[[str], None]
) -> None:
    require_program("etcd")
    with etcd_server(tmp_path) as server:
        address = server.url.partition("://")[2]
        find_each_other(f"etcd://127.0.0.1:1,{address}")
