"""Random models of a few kilobytes with a byte tokenizer and a chat template, saved as any real model is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils import logging as transformers_logging

__all__ = ["TINY_ARCHITECTURES", "save_tiny_model"]

SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCABULARY = 256 + len(SPECIAL_TOKENS)
CONTEXT_TOKENS = 512
# Larger than usual, so that the likeliest token depends on the whole prompt and not on the last token alone.
INITIALIZER_RANGE = 0.2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": INITIALIZER_RANGE,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}

TINY_ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=CONTEXT_TOKENS,
        initializer_range=INITIALIZER_RANGE, bos_token_id=256, eos_token_id=256,
    ),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "mistral-window": lambda: MistralConfig(**_SIZES, sliding_window=20),
    "gemma2-window": lambda: Gemma2Config(**_SIZES, head_dim=16, sliding_window=20, query_pre_attn_scalar=16),
}  # fmt: skip
"""Configurations by name. ``*-window`` attend to 20 tokens in some or all layers; ``gpt2`` has learnt
positions.
"""


def save_tiny_model(folder: Path, architecture: str = "llama", seed: int = 0) -> Path:
    """Make a random model and its tokenizer in ``folder``. ``architecture``: a key of TINY_ARCHITECTURES."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        make_model: Any = AutoModelForCausalLM.from_config
        model = make_model(TINY_ARCHITECTURES[architecture](), dtype=torch.float32)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for every byte, so a character outside ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    make_tokenizer: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = make_tokenizer(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0], pad_token=SPECIAL_TOKENS[0]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
