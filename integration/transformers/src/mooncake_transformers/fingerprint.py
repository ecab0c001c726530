"""A name for a model's weights and configuration that does not depend on where they were loaded from."""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash

__all__ = ["model_fingerprint"]

# Fine-tuning moves nearly every weight, so a spread sample of each tensor tells two models apart, at no
# visible cost.
SAMPLES_PER_TENSOR = 1024
# Differ between two copies of one model, or between two loads of one copy.
VOLATILE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")


def model_fingerprint(module: Any) -> str:
    """32 hex digits over the configuration and, of every weight tensor, its name, shape, type and a spread
    sample.
    """
    digest = xxhash.xxh3_128()
    config = {key: value for key, value in module.config.to_dict().items() if key not in VOLATILE_KEYS}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in module.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(_sample(weight.detach()))
    return digest.hexdigest()


def _sample(weight: torch.Tensor) -> bytes:
    count = min(weight.numel(), SAMPLES_PER_TENSOR)
    places = torch.linspace(0, weight.numel() - 1, count, dtype=torch.float64, device=weight.device).long()
    sample = weight.reshape(-1)[places].contiguous().cpu()
    return bytes(sample.view(torch.uint8).numpy())
