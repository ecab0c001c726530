"""Two processes on real GPUs: compares bytes and measures. ``python on_gpu.py`` prints a line of JSON.

It needs torch with CUDA. Run by test_on_gpu.py and by ``hatch run bench nvlink``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from mooncake_transfer import TransferConfig, TransferEngine

SIZES = (1 << 20, 16 << 20, 256 << 20)
ROUNDS = 20
DEADLINE_S = 60.0
CONFIG = TransferConfig(drivers=("nvlink",))


def numbers(torch: Any, nbytes: int, seed: int) -> Any:
    """Bytes on the GPU that tell where they came from."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


def own(nbytes: int) -> None:
    """The other process: owns a tensor, and says whether it holds what it should when it is asked."""
    import torch

    tensor = numbers(torch, nbytes, 1)
    torch.cuda.synchronize()
    with TransferEngine(CONFIG) as engine:
        sys.stdout.write(engine.register(tensor).descriptor().hex() + "\n")
        sys.stdout.flush()
        for line in sys.stdin:
            sys.stdout.write(f"{int(torch.equal(tensor, numbers(torch, nbytes, int(line))))}\n")
            sys.stdout.flush()


def best_s(act: Callable[[], None]) -> float:
    """Seconds that the best of some rounds takes."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return min(found)


def measure() -> dict[str, Any]:
    """Read and write another process's tensor. Raises AssertionError when a byte is wrong."""
    import torch

    nbytes = max(SIZES)
    owner = subprocess.Popen(
        [sys.executable, __file__, "own", str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "sizes": {}}
    try:
        with TransferEngine(CONFIG) as engine:
            place = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            other = torch.zeros_like(place)
            torch.cuda.synchronize()
            local = engine.register(place)
            remote = engine.import_region(bytes.fromhex(owner.stdout.readline()))
            engine.read(local, remote, [[0, 0, nbytes]]).wait(DEADLINE_S)
            assert torch.equal(place, numbers(torch, nbytes, 1)), "what was read is not what the owner holds"
            place.copy_(numbers(torch, nbytes, 2))
            # In the order of torch's stream: written when the copy before is done, without a synchronize.
            stream = torch.cuda.current_stream()
            if stream.cuda_stream:
                engine.write(local, remote, [[0, 0, nbytes]], stream=stream).wait(DEADLINE_S)
            else:
                torch.cuda.synchronize()
                engine.write(local, remote, [[0, 0, nbytes]]).wait(DEADLINE_S)
            owner.stdin.write("2\n")
            owner.stdin.flush()
            assert owner.stdout.readline().strip() == "1", "the owner does not hold what was written"
            for size in SIZES:

                def copy(size: int = size) -> None:
                    other[:size].copy_(place[:size])
                    torch.cuda.synchronize()

                def read(size: int = size) -> None:
                    engine.read(local, remote, [[0, 0, size]]).wait(DEADLINE_S)

                limit, ours = best_s(copy), best_s(read)
                result["sizes"][size] = {"read_gb_s": size / ours / 1e9, "copy_gb_s": size / limit / 1e9}
    finally:
        owner.stdin.close()
        owner.wait(DEADLINE_S)
        owner.stdout.close()
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["own"]:
        own(int(sys.argv[2]))
    else:
        sys.stdout.write(json.dumps(measure()) + "\n")
