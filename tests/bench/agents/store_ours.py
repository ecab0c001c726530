"""This project's store as a contestant: a client and an owner, which also has the master, on one host."""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np
import store_calls
import wire

from mooncake_store import Store
from mooncake_transfer import TransferConfig, TransferEngine


def engine_with(driver: str) -> TransferEngine:
    """An engine with one driver."""
    return TransferEngine(TransferConfig(drivers=(driver,)))


class Client(store_calls.Party):
    """Lends nothing: every byte goes to or comes from the owner's process."""

    def __init__(self, driver: str) -> None:
        super().__init__()
        self.child, told = wire.start_target([sys.executable, __file__, "--serve", "--driver", driver])
        self.pids = [os.getpid(), told["pid"]]
        self.engine = engine_with(driver)
        self.store = Store(self.engine, told["master"])
        self.memory = self.engine.allocate(store_calls.BUFFER_BYTES, prefault=True)

    def fill(self, data: bytes) -> None:
        self.memory.view()[: len(data)] = data

    def put(self, keys: list[str], size: int) -> None:
        if len(keys) == 1:
            self.store.put_from(keys[0], self.memory, 0, size)
        else:
            assert all(self.store.batch_put_from(keys, self.memory, self._places(keys, size), size))

    def get(self, key: str, size: int) -> None:
        self.store.get_into(key, self.memory, 0, size)

    def get_many(self, keys: list[str], size: int) -> None:
        assert all(self.store.batch_get_into(keys, self.memory, self._places(keys, size), size))

    def get_bytes(self, key: str) -> bytes:
        return self.store.get(key)

    def exist(self, keys: list[str]) -> None:
        assert all(self.store.batch_exist(keys))

    def remove(self, keys: list[str]) -> None:
        self.store.batch_remove(keys)

    def _places(self, keys: list[str], size: int) -> np.ndarray:
        return np.arange(len(keys), dtype=np.uint64) * np.uint64(size)


def serve(driver: str) -> None:
    """Own the memory and be the master until standard input ends."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    with engine_with(driver) as engine, Store(engine, lend_bytes=store_calls.SEGMENT_BYTES):
        wire.say(answers, {"master": engine.address, "pid": os.getpid()})
        sys.stdin.buffer.read()


def main() -> None:
    """Serve as owner, or answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--driver", default="shm")
    options = parser.parse_args()
    if options.serve:
        return serve(options.driver)
    wire.die_with_parent()
    answers = wire.take_stdout()
    client = Client(options.driver)
    with client.engine, client.store:
        wire.say(answers, client.check())
        wire.answer_requests(answers, {"measure": client.measure})


if __name__ == "__main__":
    main()
