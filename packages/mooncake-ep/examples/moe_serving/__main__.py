"""A small mixture-of-experts model on four ranks: one is killed and comes back, and a fifth arrives.

`python packages/mooncake-ep/examples/moe_serving` prints what happens, compares every token with those of the
same model in one process, and ends with status 1 when one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from model import Model, Part, run_expert
from sequences import NEW_TOKENS, PROMPTS, prompt

from mooncake_ep import ExpertOwners
from mooncake_ep.reference import Tokens
from mooncake_ep.reference_low_latency import combine, dispatch

LIMIT_S = 120.0


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Cluster:
    """The processes of the ranks, and what they tell."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._steps: list[float] = []
        self._began = time.monotonic()
        self.finished: list[tuple[int, list[int]]] = []

    def start(self, rank: int, world: int, *, later: bool = False) -> None:
        """Start the process of a rank."""
        script = Path(__file__).with_name("serving.py")
        how = "later" if later else "first"
        arguments = [str(rank), str(world), str(self._seed), how, str(self._folder)]
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True
        )
        self._running[rank] = process
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # it was killed while it wrote
                self._told.put(json.loads(line))

    def events(self, until: str, limit_s: float = LIMIT_S) -> Iterator[dict[str, Any]]:
        """What ranks tell, up to the first event of that name."""
        deadline = time.monotonic() + limit_s
        while True:
            failed = [rank for rank, process in self._running.items() if process.poll() not in (None, 0)]
            if failed:
                raise SystemExit(f"rank {failed[0]} has failed: see above")
            try:
                told = self._told.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{until!r} has not come within {limit_s} s") from None
                continue
            if told["event"] == "finished":
                self.finished.append((told["number"], told["tokens"]))
            elif told["event"] == "step":
                self._steps.append(told["s"] - told["began"])
            yield told
            if told["event"] == until:
                return

    def serve(self, sequences: int) -> None:
        """Wait until so many more sequences are complete, and say how fast."""
        began, wanted = time.monotonic(), len(self.finished) + sequences
        self._steps.clear()
        while len(self.finished) < wanted:
            for _ in self.events("finished"):
                pass
        tokens_per_s = sequences * NEW_TOKENS / (time.monotonic() - began)
        step_ms = statistics.median(self._steps) * 1e3
        self.tell(f"{sequences} sequences, {tokens_per_s:.0f} tokens/s, a step takes {step_ms:.1f} ms")

    def tell(self, text: str, at: float | None = None) -> None:
        """Say something with the time since the start."""
        say(f"{(time.monotonic() if at is None else at) - self._began:6.1f} s  {text}")

    def kill(self, rank: int) -> None:
        """Kill -9 a rank, and follow what becomes of it until every expert has two owners again."""
        killed = time.monotonic()
        process = self._running.pop(rank)
        process.send_signal(signal.SIGKILL)
        self.tell(f"kill -9 of rank {rank}", killed)
        for told in self.events("repaired"):
            if told["event"] == "lost":
                ms = (told["s"] - killed) * 1e3
                lost = told["experts_lost"] or "no"
                self.tell(f"missed after {ms:.0f} ms, {told['where']}; {lost} expert is lost", told["s"])
            self._show(told)
        process.wait(LIMIT_S)
        longest = max(self._steps, default=0.0)
        self.tell(f"the longest step meanwhile took {longest * 1e3:.0f} ms")

    def join(self, rank: int, world: int) -> None:
        """Start a rank anew or for the first time, and follow it until experts are placed for all."""
        self.start(rank, world, later=True)
        self.tell(f"rank {rank} starts")
        joined = list(self.events("joined"))[-1]
        self.tell(f"rank {rank} is let in; the others went on meanwhile", joined["s"])
        for told in self.events("repaired"):
            self._show(told)

    def _show(self, told: dict[str, Any]) -> None:
        if told["event"] == "taken over":
            self.tell(f"rank {told['rank']} takes over sequence {told['number']}", told["s"])
        if told["event"] == "repaired":
            copies = f"{told['copies']} copies of experts made in the background"
            self.tell(f"{copies}; each has {told['owners']} owners or more", told["s"])

    def stop(self) -> None:
        """Let ranks finish what they began."""
        (self._folder / "stop").touch()
        for process in self._running.values():
            if process.wait(LIMIT_S):
                raise SystemExit("a rank has failed: see above")
        while not self._told.empty():
            for _ in self.events(self._told.queue[0]["event"]):
                pass

    def end(self) -> None:
        """Leave no process behind."""
        for process in self._running.values():
            process.kill()
            process.wait()


def in_one_process(seed: int) -> list[list[int]]:
    """The tokens of every prompt by the same model, all experts here: what the ranks have to say."""
    model = Model(seed)
    owners = ExpertOwners.even(8, 1)

    def experts(layer: int, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inputs = [Tokens(x, chosen, weights)]
        packed = dispatch(inputs, owners, len(x))
        outputs = torch.stack(
            [run_expert(model.expert(layer, expert), rows) for expert, rows in enumerate(packed[0].x)]
        )
        return combine([outputs], packed, inputs, owners)[0]

    parts = [Part(prompt(number)) for number in range(PROMPTS)]
    made: list[list[int]] = [[] for _ in parts]
    for _ in range(NEW_TOKENS):
        for part, mine, token in zip(parts, made, model.step(parts, experts), strict=True):
            mine.append(token)
            part.tokens = [token]
    return made


def run(folder: Path, seed: int, victim: int, sequences: int) -> bool:
    """Serve, kill, bring back, grow; returns whether all tokens are right."""
    say("4 ranks serve 8 experts in each of 2 layers; each expert has 2 owners or more, on different ranks")
    cluster = Cluster(folder, seed)
    try:
        for rank in range(4):
            cluster.start(rank, 4)
        cluster.serve(sequences)
        cluster.kill(victim)
        cluster.serve(sequences)
        cluster.join(victim, 4)
        cluster.serve(sequences)
        cluster.join(4, 5)
        cluster.serve(sequences)
        cluster.stop()
    finally:
        cluster.end()
    expected = in_one_process(seed)
    wrong = [number for number, tokens in cluster.finished if tokens != expected[number % PROMPTS]]
    total = len(cluster.finished)
    say(
        f"{total} sequences, {total * NEW_TOKENS} tokens: "
        + (f"sequences {wrong} differ from" if wrong else "all equal to")
        + " those of one process"
    )
    return not wrong


def main() -> None:
    """Run it once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the model's weights")
    parser.add_argument("--kill", type=int, default=1, choices=range(4), help="the rank that is killed")
    parser.add_argument("--sequences", type=int, default=48, help="to complete between two events")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if not run(Path(folder), given.seed, given.kill, given.sequences):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
