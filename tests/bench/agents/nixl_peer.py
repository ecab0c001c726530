"""NIXL with its UCX backend as a contestant: two agents in two processes, host memory to host memory."""

from __future__ import annotations

import argparse
import base64
import mmap
import os
import struct
import sys
import time

import wire

COUNT = struct.Struct("q")
PAGE = struct.Struct("qq")  # notifications seen, and when the last one was, in nanoseconds of CLOCK_MONOTONIC

NOTIFIED_LIMIT_NS = 20_000_000_000


def agent(name: str, progress_thread: bool):
    """Make an agent with the UCX backend, with NIXL's own default for error handling."""
    from nixl_cu12 import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=[]))
    made.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    return made


def serve(nbytes: int, page_fd: int) -> None:
    """Be the target: with a progress thread of its own, or, given a page, seeing notifications in a loop."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    watches = page_fd >= 0
    target = agent("target", progress_thread=not watches)
    _memory, address = wire.touched_memory(nbytes)
    target.register_memory([(address, nbytes, 0, "")], "DRAM")
    metadata = base64.b64encode(target.get_agent_metadata()).decode()
    wire.say(answers, {"address": address, "pid": os.getpid(), "metadata": metadata})
    if watches:
        page = mmap.mmap(page_fd, mmap.PAGESIZE)
        seen = 0
        while True:  # ended by its parent's end
            for notes in target.get_new_notifs().values():
                seen += len(notes)
                # The time first: who sees the count also sees when.
                COUNT.pack_into(page, COUNT.size, time.monotonic_ns())
                COUNT.pack_into(page, 0, seen)
    sys.stdin.buffer.read()
    os._exit(0)  # a plain exit of nixl 1.5.1 ends in a segmentation fault


class Initiator:
    """Posts transfers, spinning until they are done, as NIXL's Python API has it."""

    def __init__(self, nbytes: int, visible: bool) -> None:
        page_fd = os.memfd_create("nixl-bench")
        os.ftruncate(page_fd, mmap.PAGESIZE)
        self.page = mmap.mmap(page_fd, mmap.PAGESIZE)
        argv = [sys.executable, __file__, "--serve", "--nbytes", str(nbytes)]
        argv += ["--page-fd", str(page_fd)] if visible else []
        self.child, told = wire.start_target(argv, pass_fds=[page_fd])
        self.remote = told["address"]
        self.visible = visible
        self.notified = 0
        self.pids = [os.getpid(), told["pid"]]
        # Without a progress thread: on few cores it only takes time from the thread that polls.
        self.agent = agent("initiator", progress_thread=False)
        self.memory, self.local = wire.touched_memory(nbytes)
        self.agent.register_memory([(self.local, nbytes, 0, "")], "DRAM")
        peer = self.agent.add_remote_agent(base64.b64decode(told["metadata"]))
        self.peer = peer.decode() if isinstance(peer, bytes) else peer

    def check(self) -> dict[str, object]:
        """Prove that bytes arrive: a pattern there and back."""
        size = 1 << 20
        pattern = os.urandom(size)
        self.memory[:size] = pattern
        write = self._handle("WRITE", [0], size)
        if self.visible:
            self._run_visible(write)
        else:
            self._run(write)
        descriptors = self.agent.get_xfer_descs([(self.local + 2 * size, size, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(self.remote, size, 0)], "DRAM")
        self._run(self.agent.initialize_xfer("READ", descriptors, there, self.peer))
        assert self.memory[2 * size : 3 * size] == pattern, "bytes were changed on the way"
        return {"pids": self.pids}

    def measure(self, op: str, size: int, count: int, seconds: float) -> dict[str, object]:
        """Time transfers of ``count`` blocks, prepared once."""
        handle = self._handle(op.upper(), wire.block_offsets(count, size), size)
        call = self._run_visible if self.visible and op == "write" else self._run
        try:
            return wire.time_calls(lambda: call(handle), seconds, self.pids)
        finally:
            self.agent.release_xfer_handle(handle)

    def _handle(self, op: str, offsets: list[int], size: int):
        local = self.agent.get_xfer_descs([(self.local + at, size, 0) for at in offsets], "DRAM")
        remote = self.agent.get_xfer_descs([(self.remote + at, size, 0) for at in offsets], "DRAM")
        notification = [b"written"] if self.visible and op == "WRITE" else []
        return self.agent.initialize_xfer(op, local, remote, self.peer, *notification)

    def _run(self, handle) -> None:
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"transfer ended in state {state}")

    def _run_visible(self, handle) -> int:
        started = time.monotonic_ns()
        self._run(handle)
        self.notified += 1
        while True:
            count, when = PAGE.unpack_from(self.page, 0)
            if count == self.notified:
                return when - started
            # The message may still lie in this side's queue, and only calls of the agent move it.
            self.agent.get_new_notifs()
            if time.monotonic_ns() - started > NOTIFIED_LIMIT_NS:
                raise RuntimeError(f"the target was not notified within {NOTIFIED_LIMIT_NS / 1e9:g} s")


def main() -> None:
    """Serve as target, or answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    parser.add_argument("--page-fd", type=int, default=-1)
    parser.add_argument("--visible", action="store_true", help="writes end when the target was notified")
    parser.add_argument("--tls", default="", help="UCX_TLS, for example tcp,self; empty: UCX's own choice")
    options = parser.parse_args()
    os.environ["UCX_NET_DEVICES"] = "lo"
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    if options.tls:
        os.environ["UCX_TLS"] = options.tls
    if options.serve:
        return serve(options.nbytes, options.page_fd)
    wire.die_with_parent()
    answers = wire.take_stdout()
    initiator = Initiator(options.nbytes, options.visible)
    wire.say(answers, initiator.check())
    wire.answer_requests(answers, {"measure": initiator.measure})
    os._exit(0)


if __name__ == "__main__":
    main()
