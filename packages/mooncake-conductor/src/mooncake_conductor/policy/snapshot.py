"""What a placement policy sees, and what it says."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import msgspec

__all__ = ["Candidate", "Placement", "Policy", "Role", "Snapshot"]

Role = Literal["prefill", "decode", "both"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that may be chosen.

    Attributes:
        url: names the worker.
        role: a worker of role ``both`` that is chosen for prefill serves the whole request.
        matched_tokens: leading tokens of the prompt that its cache holds.
        queued_tokens: tokens of work it has been given and not finished.
        requests: requests that it has been given and not finished.
        last_used: grows with every placement in the cluster; 0 for a worker that was never chosen.
    """

    url: str
    role: Role
    matched_tokens: int = 0
    queued_tokens: int = 0
    requests: int = 0
    last_used: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at the moment of a decision.

    Attributes:
        prompt_tokens: length of the prompt.
        prefill: workers that can prefill, at least one.
        decode: workers that can decode; at least one unless every prefill candidate has role ``both``.
    """

    prompt_tokens: int
    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The decision. ``prefill`` and ``decode`` are URLs; they are equal when one worker serves the whole
    request."""

    prefill: str
    decode: str
    matched_tokens: int = 0


@runtime_checkable
class Policy(Protocol):
    """A placement policy. ``place`` is a pure function: the same snapshot always gives the same placement."""

    @property
    def name(self) -> str:
        """What the configuration calls it."""

    def place(self, snapshot: Snapshot) -> Placement:
        """Choose among the snapshot's candidates."""
