"""Tokens of an answer, turned into text piece by piece, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["TextStream", "TokenDecoder"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Byte-level tokenizers need at most four tokens for a character; more pending ones are bytes that are no
# UTF-8.
MAX_PENDING_TOKENS = 8


class TokenDecoder(Protocol):
    """What a TextStream needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens; an incomplete character at the end becomes U+FFFD."""


class TextStream:
    """The text of a growing answer.

    ``push`` returns text that is final: whole characters, in which no stop string has begun. The pieces
    joined are exactly the answer's text, cut before the first stop string. Not thread-safe.
    """

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(text for text in stop if text)
        self._tokens: list[int] = []
        # Text of a token depends on the one before it (a leading space, for example), so decoding starts at
        # ``_context`` and what was decoded before ``_read`` is cut off again.
        self._context = 0
        self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that became final. After a stop string, ``stopped`` is True and
        nothing follows.
        """
        if self.stopped:
            return ""
        self._tokens.append(token)
        return self._match_stop(self._new_text(flush=False))

    def finish(self) -> str:
        """The rest: text held back, and bytes that never became a character. For the end, once."""
        if self.stopped:
            return ""
        text = self._match_stop(self._new_text(flush=True))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _new_text(self, *, flush: bool) -> str:
        known = self._decoder.decode(self._tokens[self._context : self._read])
        whole = self._decoder.decode(self._tokens[self._context :])
        pending = len(self._tokens) - self._read
        incomplete = whole.endswith(REPLACEMENT) and pending < MAX_PENDING_TOKENS
        if len(whole) <= len(known) or (incomplete and not flush):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return whole[len(known) :]

    def _match_stop(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
