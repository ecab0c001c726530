"""Build the fuzzer of the wire format from the driver's sources, and run it.

Two million frames with the address and undefined-behaviour sanitizers, as before a release::

    python drivers/tcp/tests/fuzz/run.py --frames 2000000 --sanitize
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["build", "compiler", "fuzz"]

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "core"
ABI = HERE.parents[3] / "abi"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compiler() -> str | None:
    """Return a C++ compiler of this machine, None when there is none."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def build(folder: Path, cxx: str, sanitize: bool) -> Path:
    """Compile the fuzzer into the folder and return its path. Raises CalledProcessError."""
    flags = ["-std=c++20", "-g", f"-I{CORE}", f"-I{ABI}", *(["-O1", *SANITIZE] if sanitize else ["-O0"])]
    sources = [*(path for path in CORE.glob("*.cpp") if path.name != "bind.cpp"), HERE / "fuzz_wire.cpp"]

    def compile_one(source: Path) -> Path:
        built = folder / f"{source.stem}.o"
        subprocess.run([cxx, *flags, "-c", source, "-o", built], check=True)
        return built

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compile_one, sources))
    program = folder / "fuzz_wire"
    subprocess.run([cxx, *flags, *objects, "-o", program, "-pthread", "-ldl"], check=True)
    return program


def fuzz(program: Path, frames: int, seed: int, timeout_s: float) -> str:
    """Run the fuzzer and return what it prints. Raises CalledProcessError when it finds something."""
    command = [program, str(frames), str(seed)]
    return subprocess.run(command, check=True, timeout=timeout_s, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Do it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=3600.0)
    given = parser.parse_args()
    if (cxx := compiler()) is None:
        sys.exit("no C++ compiler found; install g++ or clang++")
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), cxx, given.sanitize)
        sys.stdout.write(fuzz(program, given.frames, given.seed, given.timeout_s))


if __name__ == "__main__":
    main()
