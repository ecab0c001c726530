"""A plain copy within one process as a contestant: memcpy or streaming stores, on 1 or 2 threads."""

from __future__ import annotations

import argparse
import ctypes
import os

import wire

VARIANTS = {
    "memcpy": (0, 1),
    "memcpy, 2 threads": (0, 2),
    "streaming": (1, 1),
    "streaming, 2 threads": (1, 2),
}


class Copier:
    """Copies between two buffers of this process."""

    def __init__(self, nbytes: int, library: str) -> None:
        self.copy = ctypes.CDLL(library).plain_copy
        self.copy.restype = ctypes.c_double
        self.copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3
        self.memories = wire.touched_memory(nbytes), wire.touched_memory(nbytes)

    def check(self) -> dict[str, object]:
        """Prove that each variant copies."""
        (to, to_address), (source, source_address) = self.memories
        size = 1 << 20
        for streaming, threads in VARIANTS.values():
            source[:size] = os.urandom(size)
            self.copy(to_address, source_address, size, 1, streaming, threads)
            assert to[:size] == source[:size], "the copy differs"
        return {"pids": [os.getpid()]}

    def measure(self, op: str, size: int, count: int, seconds: float) -> dict[str, object]:
        """Time copies of ``size`` times ``count`` bytes in one piece; the fastest variant counts."""
        best: dict[str, object] = {}
        for name, (streaming, threads) in VARIANTS.items():
            found = self._time(size * count, seconds / len(VARIANTS), streaming, threads)
            if not best or found["mean_us"] < best["mean_us"]:
                best = {**found, "variant": name}
        return best

    def _time(self, nbytes: int, seconds: float, streaming: int, threads: int) -> dict[str, object]:
        (_, to), (_, source) = self.memories
        once_ns = self.copy(to, source, nbytes, 3, streaming, threads)
        calls = max(3, int(seconds * 1e9 / once_ns))
        windows = []
        for _ in range(3):
            windows += [self.copy(to, source, nbytes, max(1, calls // 3), streaming, threads)]
        found = wire.summary([int(window) for window in windows], 0.0)
        for name in ("calls", "p99_us"):  # each figure is a mean of many copies
            del found[name]
        return found


def main() -> None:
    """Answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    parser.add_argument("--library", required=True)
    options = parser.parse_args()
    wire.die_with_parent()
    answers = wire.take_stdout()
    copier = Copier(options.nbytes, options.library)
    wire.say(answers, copier.check())
    wire.answer_requests(answers, {"measure": copier.measure})


if __name__ == "__main__":
    main()
