"""Redis through redis-py with hiredis as a contestant: a server and a client, over a Unix socket."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time

import redis
import store_calls
import wire

SERVER_LIMIT_S = 20.0


class Client(store_calls.Party):
    """Values are bytes: redis has no calls that put from memory of ours or get into it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="bench-redis-")
        path = f"{self.folder.name}/redis.sock"
        self.server = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir",
             self.folder.name],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=wire.die_with_parent,
        )  # fmt: skip
        self.pids = [os.getpid(), self.server.pid]
        self.client = redis.Redis(unix_socket_path=path)
        self.memory = b"1" * store_calls.BUFFER_BYTES
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        deadline_s = time.monotonic() + SERVER_LIMIT_S
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def fill(self, data: bytes) -> None:
        self.memory = data + self.memory[len(data) :]

    def put(self, keys: list[str], size: int) -> None:
        value = memoryview(self.memory)[:size]
        if len(keys) == 1:
            self.client.set(keys[0], value)
        else:
            self.client.mset(dict.fromkeys(keys, value))

    def get(self, key: str, size: int) -> None:
        assert len(self.client.get(key)) == size

    def get_many(self, keys: list[str], size: int) -> None:
        assert [len(value) for value in self.client.mget(keys)] == [size] * len(keys)

    def get_bytes(self, key: str) -> bytes:
        return self.client.get(key)

    def exist(self, keys: list[str]) -> None:
        assert self.client.exists(*keys) == len(keys)

    def remove(self, keys: list[str]) -> None:
        self.client.delete(*keys)


def main() -> None:
    """Answer the runner."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    client = Client()
    wire.say(answers, client.check())
    wire.answer_requests(answers, {"measure": client.measure})


if __name__ == "__main__":
    main()
