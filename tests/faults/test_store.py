"""The store across processes: an unknown key, a full segment, an owner that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mooncake_store import Master, Store
from mooncake_store.errors import KeyNotFound, StoreFull
from mooncake_transfer import TransferEngine
from mooncake_transformers.cluster.testing import wait_until

MIB = 1 << 20

OWNER = f"""
import sys, threading
from mooncake_store import Store
from mooncake_transfer import TransferEngine
with TransferEngine() as engine, Store(engine, sys.argv[1], lend_bytes={4 * MIB}) as store:
    store.put("theirs", bytes(range(256)) * 64)
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    threading.Event().wait()
"""


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine() as opened:
        yield opened


def test_an_unknown_key_is_named_in_the_error(engine: TransferEngine) -> None:
    with Store(engine, lend_bytes=MIB) as store:
        with pytest.raises(KeyNotFound, match="no-such-key"):
            store.get("no-such-key")
        assert not store.exist("no-such-key")
        with pytest.raises(KeyNotFound):
            store.remove("no-such-key")


def test_a_full_store_evicts_and_never_refuses_what_fits(engine: TransferEngine) -> None:
    with Store(engine, lend_bytes=4 * MIB) as store:
        values = {f"value-{number}": os.urandom(MIB // 4) for number in range(64)}
        for key, value in values.items():
            store.put(key, value)
            assert store.get(key) == value
        kept = [key for key in values if store.exist(key)]
        assert 0 < len(kept) < len(values)
        assert all(store.get(key) == values[key] for key in kept)


def test_a_value_larger_than_the_store_is_refused_with_its_size(engine: TransferEngine) -> None:
    with Store(engine, lend_bytes=MIB) as store:
        with pytest.raises(StoreFull, match=r"2.?097.?152|2(\.0)? MiB"):
            store.put("large", bytes(2 * MIB))
        store.put("small", b"still works")
        assert store.get("small") == b"still works"


def test_what_a_killed_owner_held_becomes_a_miss(engine: TransferEngine) -> None:
    with (
        TransferEngine() as masters_engine,
        Master(masters_engine) as master,
        Store(engine, master.address) as store,
        subprocess.Popen(
            [sys.executable, "-c", OWNER, master.address], stdout=subprocess.PIPE, text=True
        ) as owner,
    ):
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert store.get("theirs") == bytes(range(256)) * 64
        owner.kill()
        wait_until(lambda: not store.exist("theirs"), "the master has noticed", 60)
        with pytest.raises(KeyNotFound):
            store.get("theirs")
