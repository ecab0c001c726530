"""A small mixture-of-experts transformer with seeded weights. What it says means nothing; that it says the
same wherever its experts run is the point.

Dense parts are in float64, so that tokens do not depend on how many are computed at once. Experts get and
return bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["EXPERTS", "HIDDEN", "LAYERS", "TOPK", "WEIGHTS", "Model", "Part", "run_expert"]

VOCABULARY, HIDDEN, LAYERS, HEADS, LONGEST = 256, 128, 2, 4, 64
EXPERTS, TOPK, INNER = 8, 2, 192
WEIGHTS = 2 * HIDDEN * INNER  # numbers of one expert

# Of a layer: bf16 tokens [tokens, hidden], chosen experts int64 [tokens, topk] and their weights float32 to
# bf16 [tokens, hidden].
Experts = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Part:
    """What one sequence adds to a batch: tokens new to the model; keys and values of those before."""

    tokens: list[int]
    keys: list[torch.Tensor] = field(default_factory=lambda: [torch.empty(0, HIDDEN).double()] * LAYERS)
    values: list[torch.Tensor] = field(default_factory=lambda: [torch.empty(0, HIDDEN).double()] * LAYERS)


class Model:
    """All but the experts, which every rank has whole; `expert` makes the weights of one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

        self._embedding = matrix(VOCABULARY, HIDDEN) * HIDDEN**0.5
        self._position = matrix(LONGEST, HIDDEN) * HIDDEN**0.5
        self._attention = [matrix(4, HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self._router = [matrix(EXPERTS, HIDDEN) for _ in range(LAYERS)]

    def expert(self, layer: int, expert: int) -> torch.Tensor:
        """The weights of an expert: bf16 [WEIGHTS]."""
        generator = torch.Generator().manual_seed(1000 * self._seed + layer * EXPERTS + expert)
        return (torch.randn(WEIGHTS, generator=generator) / HIDDEN**0.5).bfloat16()

    def step(self, batch: Sequence[Part], experts: Experts) -> list[int]:
        """The next token of each part; the parts' keys and values grow."""
        lengths = [len(part.tokens) for part in batch]
        rows = [
            self._embedding[part.tokens] + self._position[len(part.keys[0]) : len(part.keys[0]) + length]
            for part, length in zip(batch, lengths, strict=True)
        ]
        # A rank without sequences takes part all the same: others' tokens come to its experts.
        hidden = torch.cat([*rows, torch.empty(0, HIDDEN, dtype=torch.float64)])
        for layer in range(LAYERS):
            normed = _norm(hidden).split(lengths) if lengths else ()
            mixed = [self._attend(layer, part, rows) for part, rows in zip(batch, normed, strict=True)]
            hidden = hidden + torch.cat([*mixed, torch.empty(0, HIDDEN, dtype=torch.float64)])
            normed_all = _norm(hidden)
            weights, chosen = (normed_all @ self._router[layer].T).softmax(1).topk(TOPK)
            hidden = hidden + experts(layer, normed_all.bfloat16(), chosen, weights.float()).double()
        last = [rows[-1] for rows in _norm(hidden).split(lengths)] if lengths else []
        return [int((self._embedding @ row).argmax()) for row in last]

    def _attend(self, layer: int, part: Part, rows: torch.Tensor) -> torch.Tensor:
        asked, keys, values = (rows @ self._attention[layer][which] for which in range(3))
        part.keys[layer] = torch.cat([part.keys[layer], keys])
        part.values[layer] = torch.cat([part.values[layer], values])
        heads = [
            one.view(len(one), HEADS, -1).transpose(0, 1)
            for one in (asked, part.keys[layer], part.values[layer])
        ]
        scores = heads[0] @ heads[1].transpose(1, 2) / (HIDDEN // HEADS) ** 0.5
        seen, new = scores.shape[2], len(rows)
        scores = scores.masked_fill(torch.ones(new, seen).triu(seen - new + 1).bool(), float("-inf"))
        mixed = (scores.softmax(2) @ heads[2]).transpose(0, 1).reshape(new, HIDDEN)
        return mixed @ self._attention[layer][3]


def run_expert(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """bf16 [tokens, hidden] to the same shape, by the weights that `Model.expert` made."""
    into, out = weights.double().view(2, HIDDEN, INNER)
    inner = torch.nn.functional.silu(rows.double() @ into)
    return (inner @ out.T).bfloat16()


def _norm(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.square().mean(1, keepdim=True).add(1e-6).sqrt()
