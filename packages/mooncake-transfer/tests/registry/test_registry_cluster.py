"""Clusters that share a registry do not see each other."""

from __future__ import annotations

from contextlib import closing

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError, NameUnknown
from mooncake_transfer.registry import open_registry
from mooncake_transfer.registry.cluster import split_cluster
from mooncake_transfer.registry.records import ENGINES, engine_key

TTL_S = 60.0


def of_cluster(url: str, cluster: str, name: str = "") -> TransferConfig:
    return TransferConfig(registry=f"{url}?cluster={cluster}", name=name, registry_timeout_s=5.0)


def test_one_name_leads_to_another_engine_in_each_cluster(shared_url: str) -> None:
    with (
        TransferEngine(of_cluster(shared_url, "a", "worker")) as of_a,
        TransferEngine(of_cluster(shared_url, "b", "worker")) as of_b,
        TransferEngine(of_cluster(shared_url, "a")) as reader_a,
        TransferEngine(of_cluster(shared_url, "b")) as reader_b,
        TransferEngine(TransferConfig(registry=shared_url, registry_timeout_s=5.0)) as outsider,
    ):
        of_a.publish(of_a.allocate(4096, name="kv"))
        assert reader_a.connect("worker").epoch == of_a.epoch
        assert reader_b.connect("worker").epoch == of_b.epoch
        assert reader_a.find_region("worker/kv").peer.epoch == of_a.epoch
        with pytest.raises(NameUnknown, match=r"\?cluster=b "):
            reader_b.find_region("worker/kv")
        with pytest.raises(NameUnknown):
            outsider.connect("worker")


def test_every_kind_of_question_keeps_to_its_cluster(shared_url: str) -> None:
    with (
        closing(open_registry(f"{shared_url}?cluster=a%2Fb", 5.0)) as inside,
        closing(open_registry(shared_url, 5.0)) as outside,
    ):
        key = engine_key("e")
        assert inside.replace(key, None, b"1", TTL_S)
        assert outside.replace(key, None, b"2", TTL_S)
        assert inside.get(key) == b"1"
        assert inside.list(ENGINES) == {key: b"1"}
        assert outside.list(ENGINES) == {key: b"2"}
        assert inside.renew({key: b"1", engine_key("gone"): b"1"}, TTL_S) == {engine_key("gone")}
        assert inside.renew({key: b"2"}, TTL_S) == {key}
        inside.remove({key: b"1"})
        assert inside.get(key) is None
        assert outside.get(key) == b"2"
        outside.remove({key: b"2"})
        assert outside.list("mooncake/") == {}


@pytest.mark.parametrize(
    ("url", "plain", "cluster"),
    [
        ("redis://host/0", "redis://host/0", ""),
        ("redis://host/0?cluster=a", "redis://host/0", "a"),
        ("etcds://u:p?cluster=x@host?ca=f&cluster=a+b&key=k", "etcds://u:p?cluster=x@host?ca=f&key=k", "a b"),
        ("memory:m?cluster=%C3%B6", "memory:m", "ö"),
    ],
)
def test_the_cluster_is_taken_out_of_the_url(url: str, plain: str, cluster: str) -> None:
    assert split_cluster(url) == (plain, cluster)


@pytest.mark.parametrize("query", ["cluster=", "cluster=a&cluster=b"])
def test_a_cluster_without_one_name_is_refused_without_telling_the_password(query: str) -> None:
    with pytest.raises(ConfigError, match="one name after") as caught:
        open_registry(f"redis://:s3cret@127.0.0.1?{query}", 1.0)
    assert "s3cret" not in str(caught.value)
