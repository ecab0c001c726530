"""Which sequences there are, who generates them and how far they are. Every rank keeps the same book."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["NEW_TOKENS", "PROMPTS", "Book", "prompt"]

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 24


def prompt(number: int) -> list[int]:
    """The prompt of a sequence; they come back after PROMPTS of them."""
    generator = torch.Generator().manual_seed(number % PROMPTS)
    return [int(one) for one in torch.randint(0, 256, (PROMPT_TOKENS,), generator=generator)]


@dataclass
class Book:
    """Sequences under way: their generated tokens and the rank that generates each."""

    next_number: int = 0
    made: dict[int, list[int]] = field(default_factory=dict)
    rank_of: dict[int, int] = field(default_factory=dict)

    def of(self, rank: int) -> list[int]:
        """Sequences of a rank, ascending."""
        return sorted(number for number, owner in self.rank_of.items() if owner == rank)

    def add(self, tokens: dict[int, int]) -> list[tuple[int, list[int]]]:
        """Take down the next token of each sequence; returns those that are complete and forgets them."""
        for number, token in tokens.items():
            self.made[number].append(token)
        done = sorted(number for number in tokens if len(self.made[number]) == NEW_TOKENS)
        for number in done:
            del self.rank_of[number]
        return [(number, self.made.pop(number)) for number in done]

    def hand_out(self, ranks: list[int], each: int, begin_new: bool) -> list[int]:
        """Give each of the ranks so many sequences: first those of ranks that are gone, which it returns."""
        left = sorted(number for number, owner in self.rank_of.items() if owner not in ranks)
        for number in left:
            # The lightest rank, whether it has room or not: what was begun is finished.
            self.rank_of[number] = min(ranks, key=lambda rank: (len(self.of(rank)), rank))
        while begin_new and min(len(self.of(rank)) for rank in ranks) < each:
            rank = min(ranks, key=lambda rank: (len(self.of(rank)), rank))
            self.rank_of[self.next_number], self.made[self.next_number] = rank, []
            self.next_number += 1
        return left
