"""Choosing the next token from the model's logits.

A random choice depends on the seed and the token's place in the answer only, not on what was drawn before, so
the prefill worker can draw the first token and the decode worker the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Sampling", "choose_token"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the likeliest one, always."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


def choose_token(logits: torch.Tensor, sampling: Sampling, place: int) -> int:
    """The token at ``place`` (0 = first) of an answer, from float logits of shape ``[vocabulary]``."""
    if sampling.temperature <= 0.0:
        return int(torch.argmax(logits))
    scaled = logits.double().numpy() / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order])
    # Nucleus: the fewest likeliest tokens that hold top_p of the probability (Holtzman et al., 2019).
    last = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1]))
    last = min(last, len(order) - 1)
    draw = _uniform(sampling.seed, place) * cumulative[last]
    return int(order[min(int(np.searchsorted(cumulative, draw, side="right")), last)])


def _uniform(seed: int, place: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: a counter-based generator (Philox)."""
    generator = np.random.Philox(key=seed & 0xFFFF_FFFF_FFFF_FFFF, counter=place)
    return float(np.random.Generator(generator).random())
