"""A tiny random model that talks for as long as it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

from mooncake_transformers.config import calm_openmp

__all__ = ["CONTEXT_TOKENS", "save_chat_model"]

CONTEXT_TOKENS = 8192
HEAD_SCALE = 8


def save_chat_model(folder: Path) -> Path:
    """Save a random Llama of some 100,000 parameters with a byte tokenizer and a chat template in ``folder``.

    It has a context of ``CONTEXT_TOKENS`` and never ends an answer by itself, so a test decides how long a
    stream is; its text is ASCII, so that every token shows at once.
    """
    calm_openmp()
    import torch
    from safetensors.torch import load_file, save_file

    from mooncake_transformers.testing import save_tiny_model

    save_tiny_model(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    # Rotary positions have no table in the checkpoint: a longer context needs no other weights.
    config_file.write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    printable = torch.tensor([number for text, number in vocabulary.items() if text.isascii()])
    weights_file = folder / "model.safetensors"
    weights = load_file(weights_file)
    # A row of zeros has the logit 0. The greatest of so many random ones is far above it once they are large:
    # then not even sampling takes a token without a row.
    head = torch.zeros_like(weights["lm_head.weight"])
    head[printable] = weights["lm_head.weight"][printable] * HEAD_SCALE
    save_file(weights | {"lm_head.weight": head}, weights_file, metadata={"format": "pt"})
    return folder
