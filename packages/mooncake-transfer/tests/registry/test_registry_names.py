"""Engines and regions are found by name, and a name never leads to the wrong process."""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from mooncake_transfer import Peer, TransferConfig, TransferEngine
from mooncake_transfer.errors import (
    ConfigError,
    NameUnknown,
    PeerRestarted,
    RegionRefused,
    RegistryUnavailable,
    TransferError,
)
from mooncake_transfer.hooks import RegistryInfo, hookimpl
from mooncake_transfer.registry import Registry, finding, open_registry
from mooncake_transfer.registry.records import EngineRecord, engine_key
from mooncake_transfer.testing import PeerProcess
from mooncake_transfer.testing.fixtures import wait_until

TTL_S = 4.0  # some tests wait for it; in the others, nothing may stand still for so long
PAYLOAD = b"0123456789abcdef" * 256


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A registry of this process that no other test uses."""
    return f"memory:{request.node.nodeid}"


def named(url: str, name: str = "") -> TransferConfig:
    return TransferConfig(registry=url, name=name, registry_ttl_s=TTL_S, registry_timeout_s=5.0)


def unknown(engine: TransferEngine, name: str) -> bool:
    """Whether the registry has no such engine, or region when there is a slash."""
    try:
        engine.find_region(name) if "/" in name else engine.connect(name, timeout_s=1.0)
    except NameUnknown:
        return True
    except TransferError:
        pass
    return False


def test_a_published_region_is_found_by_name_and_read(shared_url: str) -> None:
    with TransferEngine(named(shared_url, "öwner 1")) as owner, TransferEngine(named(shared_url)) as reader:
        region, local = owner.allocate(4096, name="kv/0"), reader.allocate(4096)
        region.view()[:] = PAYLOAD
        owner.publish(region)
        owner.publish(region, name="alias")
        assert reader.connect("öwner 1").epoch == owner.epoch
        for path in ("öwner 1/kv/0", "öwner 1/alias"):
            local.view()[:] = bytes(4096)
            reader.read(local, reader.find_region(path), [[0, 0, 4096]]).wait(10.0)
            assert bytes(local.view()) == PAYLOAD


def test_a_region_of_another_engine_is_not_published(url: str) -> None:
    with TransferEngine(named(url, "owner")) as owner, TransferEngine(named(url)) as other:
        region = other.allocate(4096, name="kv")
        with pytest.raises(ConfigError, match="region is 'kv', which is registered with another engine"):
            owner.publish(region)
        with pytest.raises(NameUnknown):
            other.find_region("owner/kv", timeout_s=1.0)


def test_a_region_published_for_reading_cannot_be_written(url: str) -> None:
    with TransferEngine(named(url, "owner")) as owner, TransferEngine(named(url)) as reader:
        region, local = owner.allocate(4096, name="kv"), reader.allocate(4096)
        region.view()[:] = PAYLOAD
        owner.publish(region, access="r")
        remote = reader.find_region("owner/kv")
        reader.read(local, remote, [[0, 0, 4096]]).wait(10.0)
        assert bytes(local.view()) == PAYLOAD
        local.view()[:] = bytes(4096)
        with pytest.raises(RegionRefused):
            reader.write(local, remote, [[0, 0, 4096]]).wait(10.0)
        assert bytes(region.view()) == PAYLOAD


def test_a_withdrawn_region_is_no_longer_found_and_stays_usable_for_who_has_it(url: str) -> None:
    with TransferEngine(named(url, "owner")) as owner, TransferEngine(named(url)) as reader:
        region, local = owner.allocate(4096, name="kv"), reader.allocate(4096)
        region.view()[:] = PAYLOAD
        owner.publish(region)
        owner.publish(region, name="alias")
        remote = reader.find_region("owner/kv")
        owner.withdraw("alias")
        wait_until(lambda: unknown(reader, "owner/alias"), "one name is taken back")
        assert reader.find_region("owner/kv").name == "kv"
        owner.withdraw(region)
        wait_until(lambda: unknown(reader, "owner/kv"), "all names are taken back")
        reader.read(local, remote, [[0, 0, 4096]]).wait(10.0)
        assert bytes(local.view()) == PAYLOAD


def test_names_go_with_their_engine_and_regions_with_their_memory(shared_url: str) -> None:
    with TransferEngine(named(shared_url)) as reader:
        with TransferEngine(named(shared_url, "short")) as owner:
            region, other = owner.allocate(4096, name="a"), owner.allocate(4096, name="b")
            owner.publish(region)
            owner.publish(other)
            reader.find_region("short/a")
            region.close()
            wait_until(lambda: unknown(reader, "short/a"), "a closed region is no longer found")
            assert reader.find_region("short/b").name == "b"
        # Not within a lifetime of entries: it said goodbye.
        with closing(open_registry(shared_url, 5.0)) as registry:
            assert registry.list("mooncake/") == {}


def test_the_name_of_a_killed_engine_expires_and_its_successor_is_reached(tmp_path: Path) -> None:
    from mooncake_transfer.testing.registry_servers import metadata_server

    with metadata_server(tmp_path) as server, TransferEngine(named(server.url)) as reader:
        with PeerProcess(named(server.url, "worker")) as first:
            assert reader.connect("worker").address == first.address
            first.kill()
            # The old entry still stands, so this is what a restart meets.
            with PeerProcess(named(server.url, "worker")) as second:
                peer = reader.connect("worker", timeout_s=10.0)
                assert peer.address == second.address != first.address
                second.kill()
        wait_until(lambda: unknown(reader, "worker"), "the name of a dead engine expires")


def test_a_newer_engine_takes_the_name_and_the_older_one_gets_it_back(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = open_registry(url, 5.0)

    def holder() -> str:
        value = registry.get(engine_key("twin"))
        return "" if value is None else msgspec.json.decode(value, type=EngineRecord).address

    with TransferEngine(named(url, "twin")) as older, TransferEngine(named(url)) as reader:
        older.publish(older.allocate(4096, name="r"))
        with TransferEngine(named(url, "twin")) as newer:
            assert holder() == newer.address
            wait_until(lambda: "claimed by a newer engine" in caplog.text, "the older one says so")
            wait_until(lambda: unknown(reader, "twin/r"), "the older one takes its regions back")
            # A registry that lost everything: whoever comes first, the newer one has it in the end.
            registry.remove(registry.list("mooncake/"))
            wait_until(lambda: holder() == newer.address, "the newer one is back")
        wait_until(lambda: holder() == older.address, "the older one has the name again")
        wait_until(lambda: not unknown(reader, "twin/r"), "its region is found again")


def test_a_name_never_leads_to_another_process_at_its_old_address(url: str) -> None:
    with TransferEngine(named(url)) as reader, TransferEngine() as stranger:
        record = EngineRecord(stranger.address, stranger.epoch + 1, 1)
        open_registry(url, 5.0).replace(engine_key("ghost"), None, msgspec.json.encode(record), 60.0)
        with pytest.raises(PeerRestarted, match="another process"):
            reader.connect("ghost", timeout_s=3.0)


@pytest.mark.parametrize("name", ["a/b", "host:1", "x" * 256, "\ud800"])
def test_a_name_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        TransferConfig(registry="memory:x", name=name)


def test_a_name_without_a_registry_is_refused() -> None:
    with pytest.raises(ConfigError, match="registry is empty"):
        TransferConfig(name="a")
    with TransferEngine() as engine:
        with pytest.raises(ConfigError, match=r"host:port or set TransferConfig\.registry"):
            engine.connect("somebody")
        with pytest.raises(ConfigError, match=r"import_region\(descriptor\) or set TransferConfig\.registry"):
            engine.find_region("somebody/kv")
        with pytest.raises(ConfigError, match=r"TransferConfig\.name"):
            engine.publish(engine.allocate(4096))


def test_two_regions_of_one_engine_cannot_have_one_name(url: str) -> None:
    with TransferEngine(named(url, "e")) as engine:
        first, second = engine.allocate(4096, name="r"), engine.allocate(4096, name="r")
        engine.publish(first)
        engine.publish(first)
        with pytest.raises(ConfigError, match=r"'r'.*engine\.withdraw"):
            engine.publish(second)
        engine.withdraw("r")
        engine.publish(second)
        second.close()
        engine.publish(first)
        with pytest.raises(ConfigError, match="engine-name/region-name"):
            engine.find_region("r")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("consul://127.0.0.1", "no known scheme"),
        ("127.0.0.1", "no known scheme"),
        ("redis://:s3cret@127.0.0.1/db", "no number of a database"),
        ("redis://:s3cret@a,b", "several servers"),
        ("etcd://root@127.0.0.1", "both user and password"),
        ("etcd://root:s3cret@127.0.0.1:x", "host:port"),
        ("etcd://root:s3cret@127.0.0.1/path", "has a path"),
        ("http://root:s3cret@127.0.0.1", "user name"),
        ("http://:s3cret@127.0.0.1?ca=f", "https:// takes them"),
        ("https://:s3cret@127.0.0.1?colour=red", "unknown options colour"),
        ("https://:s3cret@127.0.0.1?ca=missing.pem", "missing.pem"),
        ("redis://127.0.0.1?password_file=missing.txt", "missing.txt"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_telling_its_password(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        TransferEngine(TransferConfig(registry=url))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "library", "extra"),
    [("http", "httpx", "registry-http"), ("etcd", "httpx", "etcd"), ("redis", "redis", "redis")],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, scheme: str, library: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for module in ("exchange", "http", "etcd", "etcd_client", "redis"):
        monkeypatch.delitem(sys.modules, f"mooncake_transfer.registry.{module}", raising=False)
    with pytest.raises(ConfigError, match=rf'pip install "mooncake-transfer\[{extra}\]"'):
        open_registry(f"{scheme}://127.0.0.1", 1.0)


class Moody:
    """A third party's registry that fails in its own way until it is told not to."""

    where = "moody:"

    def __init__(self, inner: Registry) -> None:
        self.inner = inner
        self.broken = True

    def _checked(self) -> Registry:
        if self.broken:
            raise KeyError("moody")
        return self.inner

    def get(self, key: str) -> bytes | None:
        return self._checked().get(key)

    def list(self, prefix: str) -> dict[str, bytes]:
        return self._checked().list(prefix)

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        return self._checked().replace(key, old, new, ttl_s)

    def renew(self, entries: Mapping[str, bytes], ttl_s: float) -> set[str]:
        return self._checked().renew(entries, ttl_s)

    def remove(self, entries: Mapping[str, bytes]) -> None:
        self._checked().remove(entries)

    def close(self) -> None:
        self.inner.close()


def test_a_registry_of_a_plugin_is_used_and_its_own_failures_end_nothing(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    moody = Moody(open_registry(url, 1.0))
    plugin = ModuleType("moody_plugin")
    infos = [RegistryInfo("moody", lambda url, timeout_s: moody), RegistryInfo("redis", lambda u, t: moody)]
    plugin.mooncake_registries = hookimpl(lambda: infos)  # type: ignore[attr-defined]
    plugins = finding.registry_plugins()
    plugins.manager.register(plugin, name="moody")
    try:
        assert finding.registries()["redis"].open is not infos[1].open
        assert "second registry named 'redis'" in caplog.text
        with TransferEngine(named("moody:", "m")), TransferEngine(named(url)) as reader:
            assert unknown(reader, "m")
            assert "announcing 'm' in registry moody: failed" in caplog.text
            moody.broken = False
            wait_until(lambda: not unknown(reader, "m"), "the name is announced after all")
    finally:
        plugins.manager.unregister(plugin)


def test_a_forked_child_does_not_take_the_name_away(url: str) -> None:
    with TransferEngine(named(url, "parent")) as engine, TransferEngine(named(url)) as reader:
        child = os.fork()
        if child == 0:
            engine.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert reader.connect("parent").epoch == engine.epoch


def test_an_engine_nobody_closed_ends_its_announcer(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    engine = TransferEngine(named(url, "lost"))
    announcer = engine._directory._announcer
    assert announcer is not None
    assert announcer.holds_name
    del engine
    wait_until(lambda: not announcer._thread.is_alive(), "its thread ends")
    assert open_registry(url, 1.0).list("mooncake/") == {}
    assert not caplog.records


def test_the_registry_is_named_with_cause_and_remedy_when_it_does_not_answer() -> None:
    said = r"http://127\.0\.0\.1:1 .*refused.*check that it runs"
    with (
        TransferEngine(TransferConfig(registry="http://127.0.0.1:1")) as engine,
        pytest.raises(RegistryUnavailable, match=said),
    ):
        engine.connect("somebody")


@pytest.mark.parametrize("end", ["closed", "died"])
def test_peers_reached_by_name_are_kept_no_longer_than_they_are_there(url: str, end: str) -> None:
    """Of many that come and go, neither the peer nor what the registry said of it stays."""
    reached: weakref.WeakSet[Peer] = weakref.WeakSet()

    def nobody_keeps_one() -> bool:
        gc.collect()
        return not reached

    with TransferEngine(named(url)) as reader:
        for number in range(5):
            name = f"passing {number}"
            with TransferEngine(named(url, name)):
                peer = reader.connect(name)
                reached.add(peer)
                if end == "closed":
                    peer.close()
            wait_until(lambda peer=peer: not peer.alive, "it is known to be gone")  # type: ignore[misc]
            del peer
            assert unknown(reader, name)
        reader.rails()  # looks at all peers, and forgets those that are gone
        wait_until(nobody_keeps_one, "nobody keeps one of them")
        assert reader._directory._peers == {}
        assert reader._directory._known == {}
