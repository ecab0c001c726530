"""Bare sockets as a contestant: two processes, one connection, both sides polling, nothing but the bytes."""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import sys

import wire

# As the tcp driver sets them between two processes of one host.
SEND_BUFFER_BYTES = 512 << 10
CONGESTION = b"reno"


def load(path: str) -> ctypes.CDLL:
    """Load the loops."""
    library = ctypes.CDLL(path)
    library.plain_socket_move.restype = ctypes.c_bool
    library.plain_socket_move.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool]
    library.plain_socket_serve.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    return library


def tune(connection: socket.socket) -> None:
    """Set what both sides set; the loops ask without waiting."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION)


def serve(nbytes: int, library: str) -> None:
    """Be the target of one connection."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    _memory, address = wire.touched_memory(nbytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire.say(answers, {"pid": os.getpid(), "port": listener.getsockname()[1]})
        listener.settimeout(wire.START_LIMIT_S)
        connection, _ = listener.accept()
    tune(connection)
    load(library).plain_socket_serve(connection.fileno(), address, nbytes)


class Initiator:
    """The side that asks."""

    def __init__(self, nbytes: int, library: str) -> None:
        argv = [sys.executable, __file__, "--serve", "--nbytes", str(nbytes), "--library", library]
        self.child, told = wire.start_target(argv)
        self.pids = [os.getpid(), told["pid"]]
        self.library = load(library)
        self.memory, self.address = wire.touched_memory(nbytes)
        self.connection = socket.create_connection(("127.0.0.1", told["port"]), wire.START_LIMIT_S)
        tune(self.connection)

    def check(self) -> dict[str, object]:
        """Prove that what is written comes back."""
        size = 1 << 20
        wanted = os.urandom(size)
        self.memory[:size] = wanted
        self._move(size, False)
        self.memory[:size] = bytes(size)
        self._move(size, True)
        assert self.memory[:size] == wanted, "other bytes came back"
        return {"pids": self.pids}

    def measure(self, op: str, size: int, count: int, seconds: float) -> dict[str, object]:
        """Time transfers of one block."""
        assert count == 1
        return wire.time_calls(lambda: self._move(size, op == "read"), seconds, self.pids)

    def _move(self, size: int, is_read: bool) -> None:
        if not self.library.plain_socket_move(self.connection.fileno(), self.address, size, is_read):
            raise ConnectionError("the target is gone")


def main() -> None:
    """Serve, or answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--nbytes", type=int, default=16 << 20)
    parser.add_argument("--library", required=True)
    options = parser.parse_args()
    if options.serve:
        return serve(options.nbytes, options.library)
    wire.die_with_parent()
    answers = wire.take_stdout()
    initiator = Initiator(options.nbytes, options.library)
    wire.say(answers, initiator.check())
    wire.answer_requests(answers, {"measure": initiator.measure})


if __name__ == "__main__":
    main()
