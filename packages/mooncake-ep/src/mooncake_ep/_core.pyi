"""
Compiled core of mooncake_ep: placement of experts, rows of activations, memory that ranks share, process groups.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def eplb_exact(layers: int, experts: int, replicas: int, groups: int, nodes: int, gpus: int, load: int, group_load: int, expert_of: int, replica_of: int, counts: int) -> None:
    """
    DeepSeek's placement. Addresses of float32 load [layers, experts] and group_load [layers, groups], and of
    int64 results: expert_of and replica_of [layers, replicas], counts [layers, experts].
    """

def eplb_rebalance(slots_of_rank: Sequence[int], active: Sequence[bool], layers: int, experts: int, min_replicas: int, apart: bool, max_moves: int, load: int, expert_of: int) -> bytes:
    """
    Change int64 expert_of [layers, slots] in place so that float32 load [layers, experts] is spread evenly.
    Returns the moves, four int64 each: layer, expert, source, destination. Raises ValueError without room.
    """

def vectors() -> str:
    """The vectors that loops over numbers use: avx512, avx2 or plain."""

def use_vectors(name: str) -> bool:
    """Use others; False when this processor has none such."""

def quantize(source: int, rows: int, width: int, round_scale: bool, to: int, scales: int) -> None:
    """
    bf16 [rows, width] to e4m3 [rows, width] and float32 scales [rows, width / 128]. All are addresses.
    """

def dequantize(source: int, scales: int, rows: int, width: int, to: int) -> None:
    """e4m3 [rows, width] times float32 scales [rows, width / 128] to bf16."""

def sum_rows(is_bf16: bool, count: int, most: int, width: int, addends: int, weights: int, first: int, second: int, out: int) -> None:
    """
    out [count, width]: of rows at the addresses uint64 addends [count, most], 0 for none, times float32
    weights of that shape (0: all 1), after rows of first and second [count, width] (0: none).
    """

def count_tokens(routing: Sequence[int], per_expert: int) -> int:
    """
    How many tokens have an expert there; adds to int64 per_expert.
    routing: topk, tokens, choices, local_of.
    """

def take_tokens(routing: Sequence[int], rows: Sequence[int], weights: int, topk_to: int, weights_to: int, taken: int) -> None:
    """
    A row for every token that has an expert there. rows: from, scales_from, row_bytes, groups, to, scales_to.
    """

def take_choices(routing: Sequence[int], rows: Sequence[int], rows_of_expert: int, next: int, taken: int) -> None:
    """
    A row for every choice there, packed by expert in blocks of rows_of_expert; scales in columns.
    """

def take_expanded(routing: Sequence[int], rows: Sequence[int], weights: int, next: int, weights_to: int, taken: int) -> None:
    """A row for every choice there, from row next[expert] on."""

def copy_blocks(source: int, to: int, blocks: int, block_bytes: int, counts: int, row_bytes: int) -> None:
    """The first int64 counts[block] rows of every block."""

def logfmt_bytes(width: int) -> int:
    """Bytes of an encoded row."""

def encode_logfmt(source: int, to: int, blocks: int, block_rows: int, counts: int, width: int) -> None:
    """The first int64 counts[block] bf16 rows of every block, encoded."""

def sum_logfmt(count: int, most: int, width: int, addends: int, weights: int, out: int) -> None:
    """As sum_rows of bf16, of encoded rows."""

def find_choices(topk: int, tokens: int, choices: int, base: int, experts: int, row_bytes: int, addends: int) -> None:
    """
    Addresses [tokens, choices] of what experts return, from where the rows of each begin.
    """

def find_ranks(topk: int, tokens: int, choices: int, rank_of: int, base: int, ranks: int, row_bytes: int, addends: int) -> None:
    """Addresses [tokens, ranks] of what ranks return."""

class Window:
    """
    Memory of one rank that all ranks of a host see. Its owner alone writes it; but others may end
    words, which then keep their value.
    """

    @staticmethod
    def create(bytes: int) -> Window:
        """
        A new one; its pages take memory once they are written. Raises OSError.
        """

    @staticmethod
    def open(path: str, bytes: int) -> Window:
        """A peer's, by a path to its file. Raises OSError."""

    @property
    def fd(self) -> int:
        """Descriptor of the file that it maps."""

    @property
    def address(self) -> int:
        """Where it begins in this process."""

    def memory(self, offset: int, bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), device='cpu')]:
        """A part of it, by DLPack; keeps the window. Raises ValueError."""

    def load(self, word: int) -> int:
        """A word, with all that its writer wrote before."""

    def store(self, word: int, value: int) -> None:
        """Set a word of ours and wake who waits for it."""

    def post(self, word: int, value: int) -> bool:
        """The same; False, and nothing changes, when it has ended."""

    def end(self, word: int, least: int) -> bool:
        """
        End a peer's word that is less than `least`; False when it has reached that.
        """

    def ended(self, word: int) -> bool:
        """Whether another rank has ended the word."""

    def wait(self, word: int, least: int, deadline_ns: int, pidfd: int) -> int:
        """
        Wait until a word is `least` or more: 0; else 1 when the deadline passed (ns of time.monotonic),
        2 when the process of `pidfd` has died, 3 when the word has ended.
        """

def has_died(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""

class GroupResult:
    """How an operation of a process group ended, unless with every member."""

    @property
    def code(self) -> int: ...

    @property
    def reason(self) -> str: ...

    @property
    def contributors(self) -> list[int]: ...

    @property
    def source(self) -> int: ...

class GroupEngine:
    """One rank of a process group whose ranks share this host."""

    def __init__(self, capacity: int, rank: int, pid: int, fd: int) -> None: ...

    def all_reduce(self, data: int, count: int, type: int, op: int, factor: float, timeout_s: float, queued: bool) -> object: ...

    def reduce_to(self, root: int, data: int, count: int, type: int, op: int, factor: float, timeout_s: float, queued: bool) -> object: ...

    def reduce_scatter(self, out: int, inputs: Sequence[tuple[int, int]], type: int, op: int, factor: float, timeout_s: float, queued: bool) -> object: ...

    def all_gather(self, outs: Sequence[tuple[int, int]], data: int, nbytes: int, timeout_s: float, queued: bool) -> object: ...

    def all_gather_even(self, out: int, ranks: int, data: int, nbytes: int, timeout_s: float, queued: bool) -> object: ...

    def gather(self, root: int, outs: Sequence[tuple[int, int]], data: int, nbytes: int, timeout_s: float, queued: bool) -> object: ...

    def broadcast(self, root: int, data: int, nbytes: int, timeout_s: float, queued: bool) -> object: ...

    def scatter(self, root: int, out: int, nbytes: int, inputs: Sequence[tuple[int, int]], timeout_s: float, queued: bool) -> object: ...

    def all_to_all(self, outs: Sequence[tuple[int, int]], inputs: Sequence[tuple[int, int]], timeout_s: float, queued: bool) -> object: ...

    def barrier(self, timeout_s: float, queued: bool) -> object: ...

    def done(self, ticket: int) -> bool: ...

    def finish(self, ticket: int, timeout_s: float) -> object: ...

    def send(self, to: int, data: int, nbytes: int, tag: int) -> int: ...

    def receive(self, source: int, data: int, nbytes: int, tag: int) -> int: ...

    def message_done(self, number: int) -> bool: ...

    def finish_message(self, number: int, timeout_s: float) -> object: ...

    def move_messages_aside(self) -> None: ...

    def claim(self) -> None:
        """Takes the place of this rank: others can be told to let it in."""

    def claimed(self, ranks: Sequence[int]) -> bool: ...

    def waits(self, rank: int) -> bool: ...

    def gone(self, rank: int) -> bool: ...

    def found(self, ranks: Sequence[int], timeout_s: float) -> GroupResult: ...

    def admit(self, ranks: Sequence[int], timeout_s: float) -> GroupResult: ...

    def expel(self, ranks: Sequence[int], timeout_s: float) -> GroupResult: ...

    def join(self, timeout_s: float) -> GroupResult: ...

    def plan_fault(self, point: int, nth: int, kill: bool) -> None: ...

    def close(self) -> None: ...

    @property
    def members(self) -> list[int]: ...

    @property
    def joined(self) -> bool: ...

    @property
    def capacity(self) -> int: ...

    @property
    def address(self) -> tuple[int, int]:
        """Process and descriptor by which others find the group."""
