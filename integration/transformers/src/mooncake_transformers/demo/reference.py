"""The same requests answered by the same model run whole in one process: what the tokens must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mooncake_transformers.config import calm_openmp
from mooncake_transformers.demo.client import Answer
from mooncake_transformers.demo.conversation import Message

__all__ = ["Reference", "WholeModel", "first_difference"]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """One request's prompt and greedy answer as token ids, and the ids that end an answer."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    end_token_ids: list[int]


class WholeModel:
    """A causal language model and its tokenizer as transformers loads them; none of the cluster's code."""

    def __init__(self, source: str, *, dtype: str, device: str, threads: int = 0) -> None:
        """Load from a folder or the hub. Takes seconds; raises OSError when there is no such model.

        Args:
            source: the folder or the hub name.
            dtype: a torch dtype's name.
            device: a torch device.
            threads: how many torch computes with, in the whole process; 0 leaves that as it is.
        """
        calm_openmp()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        if threads > 0:
            torch.set_num_threads(threads)
        quieten: Any = transformers_logging.disable_progress_bar
        quieten()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
        self._model: Any = model.to(device).eval()

    def answer(self, prompt: str | list[Message], *, max_tokens: int) -> Reference:
        """Continue a text, or answer a chat, with ``generate``: greedy and from nothing."""
        import torch
        from transformers import GenerationConfig

        if isinstance(prompt, str):
            encoded = self._tokenizer(prompt, return_tensors="pt")
        else:
            encoded = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        input_ids = encoded["input_ids"].to(self._model.device)
        # A configuration of its own: the model's may sample, and this must be plain greedy.
        make_config: Any = GenerationConfig
        ends = self._end_token_ids()
        greedy = make_config(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        )
        mask = torch.ones_like(input_ids)
        with torch.inference_mode():
            whole = self._model.generate(input_ids, attention_mask=mask, generation_config=greedy)[0].tolist()
        prompt_length = input_ids.shape[1]
        return Reference(
            prompt_token_ids=whole[:prompt_length],
            token_ids=whole[prompt_length:],
            end_token_ids=ends,
        )

    def _end_token_ids(self) -> list[int]:
        # Checkpoints state it in one, two or all three of these places.
        places = (self._model.generation_config, self._model.config, self._tokenizer)
        stated = [place.eos_token_id for place in places]
        return sorted(
            {token for one in stated for token in (one if isinstance(one, list) else [one])} - {None}
        )


def first_difference(answer: Answer, reference: Reference) -> str | None:
    """Where an answer first differs from its reference, in words, or None when all tokens are equal.

    The token that ends an answer is not compared: a server may keep it to itself.
    """
    pairs = (
        ("prompt", answer.prompt_token_ids, reference.prompt_token_ids),
        ("answer", _without_end(answer.token_ids, reference), _without_end(reference.token_ids, reference)),
    )
    for what, found, expected in pairs:
        for position, (one, other) in enumerate(zip(found, expected, strict=False)):
            if one != other:
                return f"{what} token {position} is {one}, expected {other}"
        if len(found) != len(expected):
            return f"the {what} has {len(found)} tokens, expected {len(expected)}"
    return None


def _without_end(token_ids: Sequence[int], reference: Reference) -> list[int]:
    ids = list(token_ids)
    return ids[:-1] if ids and ids[-1] in reference.end_token_ids else ids
