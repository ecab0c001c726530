"""The upstream Mooncake Store over tcp as a contestant: a master, an owner of memory, and a client."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import store_calls
import wire

MASTER_LIMIT_S = 20.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_master() -> tuple[subprocess.Popen[bytes], str]:
    """Start the master of the wheel; returns it with its address."""
    import mooncake

    program = Path(mooncake.__file__).with_name("mooncake_master")
    program.chmod(0o755)
    port = free_port()
    child = subprocess.Popen(
        [program, f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}",
         "--metrics_host=127.0.0.1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=wire.die_with_parent,
    )  # fmt: skip
    deadline_s = time.monotonic() + MASTER_LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return child, f"127.0.0.1:{port}"
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the master did not start ({child.poll()})") from None
            time.sleep(0.05)


def open_store(master: str, segment_bytes: int):
    """Join the master with a segment of so many bytes."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master)
    if status:
        raise RuntimeError(f"setup() returned {status}")
    return store


def serve(master: str) -> None:
    """Own the memory until standard input ends."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    store = open_store(master, store_calls.SEGMENT_BYTES)
    wire.say(answers, {"pid": os.getpid()})
    sys.stdin.buffer.read()
    del store
    os._exit(0)


class Client(store_calls.Party):
    """Lends nothing: every byte goes to or comes from the owner's process."""

    def __init__(self) -> None:
        super().__init__()
        self.master, address = start_master()
        self.child, told = wire.start_target([sys.executable, __file__, "--serve", "--master", address])
        self.pids = [os.getpid(), self.master.pid, told["pid"]]
        self.store = open_store(address, 0)
        self.memory, self.address = wire.touched_memory(store_calls.BUFFER_BYTES)
        if status := self.store.register_buffer(self.address, store_calls.BUFFER_BYTES):
            raise RuntimeError(f"register_buffer() returned {status}")

    def fill(self, data: bytes) -> None:
        self.memory[: len(data)] = data

    def put(self, keys: list[str], size: int) -> None:
        if len(keys) == 1:
            failed = self.store.put_from(keys[0], self.address, size)
        else:
            failed = any(self.store.batch_put_from(keys, self._places(keys, size), [size] * len(keys)))
        if failed:
            raise RuntimeError(f"a put of {len(keys)} values failed ({failed})")

    def get(self, key: str, size: int) -> None:
        assert self.store.get_into(key, self.address, size) == size

    def get_many(self, keys: list[str], size: int) -> None:
        sizes = [size] * len(keys)
        assert self.store.batch_get_into(keys, self._places(keys, size), sizes) == sizes

    def get_bytes(self, key: str) -> bytes:
        return self.store.get(key)

    def exist(self, keys: list[str]) -> None:
        assert sum(self.store.batch_is_exist(keys)) == len(keys)

    def remove(self, keys: list[str]) -> None:
        self.store.batch_remove(keys, True)

    def _places(self, keys: list[str], size: int) -> list[int]:
        return [self.address + i * size for i in range(len(keys))]


def main() -> None:
    """Serve as owner, or answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--master", default="")
    options = parser.parse_args()
    if options.serve:
        return serve(options.master)
    wire.die_with_parent()
    answers = wire.take_stdout()
    client = Client()
    wire.say(answers, client.check())
    wire.answer_requests(answers, {"measure": client.measure})
    os._exit(0)


if __name__ == "__main__":
    main()
