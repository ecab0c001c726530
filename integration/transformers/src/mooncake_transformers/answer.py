"""A growing answer: which token comes next, what text that makes, and when it is over. No model in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mooncake_transformers.sampling import Sampling, choose_token
from mooncake_transformers.text_stream import TextStream

__all__ = ["Answer", "FinishReason", "TokenStep"]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenStep:
    """One token of an answer, the text that became final with it, and why the answer is over, if it is."""

    token: int
    text: str
    finish: FinishReason | None


class Answer:
    """State of one answer. Used by one thread at a time.

    Args:
        sampling: how tokens are drawn.
        text: turns tokens into text and finds stop strings.
        eos_token_ids: tokens that end the answer.
        max_tokens: the answer ends at this many tokens, at least 1.
    """

    def __init__(
        self, sampling: Sampling, text: TextStream, eos_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        assert max_tokens >= 1, "an answer has at least one token"
        self._sampling = sampling
        self._text = text
        self._eos_token_ids = eos_token_ids
        self._max_tokens = max_tokens
        self.tokens: list[int] = []

    @property
    def max_tokens(self) -> int:
        """Most tokens the answer can have."""
        return self._max_tokens

    def advance(self, logits: torch.Tensor) -> TokenStep:
        """Draw the next token from float logits of shape ``[vocabulary]`` and add it."""
        return self.accept(choose_token(logits, self._sampling, len(self.tokens)))

    def accept(self, token: int) -> TokenStep:
        """Add a token that was drawn elsewhere."""
        self.tokens.append(token)
        if token in self._eos_token_ids:
            return TokenStep(token, self._text.finish(), "stop")
        text = self._text.push(token)
        if self._text.stopped:
            return TokenStep(token, text, "stop")
        if len(self.tokens) >= self._max_tokens:
            return TokenStep(token, text + self._text.finish(), "length")
        return TokenStep(token, text, None)
