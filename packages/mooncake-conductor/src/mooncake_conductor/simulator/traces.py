"""Traces of requests: when each came, how long it is, and of which blocks its prompt is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake_conductor._errors import TraceUnreadable

__all__ = ["MOONCAKE_BLOCK_TOKENS", "Trace", "read_mooncake", "write_mooncake"]

MOONCAKE_BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    """One request of Mooncake's published traces; equal ids are equal prefixes up to there."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True)
class Trace:
    """Requests in the order they came.

    Attributes:
        arrival_s: float64 [requests], from the first one.
        prompt: int64 [requests], tokens.
        output: int64 [requests], tokens.
        blocks: int64, ids of all prompts' blocks, one after the other; 0 to ``kinds - 1``.
        first: int64 [requests + 1], where each prompt's blocks begin.
        kinds: how many different blocks there are.
        block_tokens: tokens in a block; the last of a prompt may have fewer.
    """

    arrival_s: NDArray[np.float64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    blocks: NDArray[np.int64]
    first: NDArray[np.int64]
    kinds: int
    block_tokens: int

    def __len__(self) -> int:
        return len(self.prompt)

    def faster(self, factor: float) -> Trace:
        """The same requests, so many times faster."""
        return replace(self, arrival_s=self.arrival_s / factor)

    def jittered(self, seed: int, within_s: float) -> Trace:
        """The same requests, each up to ``within_s`` later: published times are rounded to steps."""
        late_s = np.random.default_rng(seed).uniform(0, within_s, len(self))
        return self._in_order(self.arrival_s + late_s)

    def with_output(self, tokens: int) -> Trace:
        """The same prompts, each answered by so many tokens."""
        return replace(self, output=np.full(len(self), tokens, np.int64))

    def _in_order(self, arrival_s: NDArray[np.float64]) -> Trace:
        order = np.argsort(arrival_s, kind="stable")
        counts = np.diff(self.first)[order]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        blocks = np.concatenate([self.blocks[self.first[i] : self.first[i + 1]] for i in order])
        return replace(
            self,
            arrival_s=arrival_s[order],
            prompt=self.prompt[order],
            output=self.output[order],
            blocks=blocks,
            first=first,
        )


def read_mooncake(path: str | Path) -> Trace:
    """Mooncake's format: a JSON object a line. Raises TraceUnreadable, which names the line."""
    decoder = msgspec.json.Decoder(_Line)
    lines: list[_Line] = []
    try:
        with Path(path).open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    lines.append(_checked(decoder.decode(text), path, number))
    except OSError as error:
        raise TraceUnreadable(f"the trace {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise TraceUnreadable(
            f"{path}, line {len(lines) + 1}: no request of Mooncake's format: {error}"
        ) from error
    if not lines:
        raise TraceUnreadable(f"the trace {path} has no requests")
    lines.sort(key=lambda line: line.timestamp)
    return _packed(lines)


def _checked(line: _Line, path: str | Path, number: int) -> _Line:
    blocks = -(-line.input_length // MOONCAKE_BLOCK_TOKENS)
    if line.input_length < 1 or line.output_length < 0 or len(line.hash_ids) != blocks:
        raise TraceUnreadable(
            f"{path}, line {number}: {line.input_length} tokens of input with {len(line.hash_ids)} hash_ids "
            f"and {line.output_length} of output; an id is due for each {MOONCAKE_BLOCK_TOKENS} begun"
        )
    return line


def _packed(lines: list[_Line]) -> Trace:
    numbers: dict[int, int] = {}
    blocks = [numbers.setdefault(one, len(numbers)) for line in lines for one in line.hash_ids]
    counts = np.array([len(line.hash_ids) for line in lines])
    came_s = np.array([line.timestamp for line in lines]) / 1e3
    return Trace(
        arrival_s=came_s - came_s[0],
        prompt=np.array([line.input_length for line in lines], np.int64),
        output=np.array([line.output_length for line in lines], np.int64),
        blocks=np.array(blocks, np.int64),
        first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        kinds=len(numbers),
        block_tokens=MOONCAKE_BLOCK_TOKENS,
    )


def write_mooncake(path: str | Path, requests: Iterable[Mapping[str, object]]) -> None:
    """Write requests, each with the fields of Mooncake's format."""
    encoder = msgspec.json.Encoder()
    with Path(path).open("wb") as file:
        for request in requests:
            file.write(encoder.encode(request) + b"\n")
