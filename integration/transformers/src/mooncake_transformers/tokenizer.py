"""Text to tokens and back, as the model's own tokenizer and chat template do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from mooncake_transformers._errors import MalformedRequest, UnsupportedModel

__all__ = ["Tokenizer"]


class Tokenizer:
    """A Hugging Face tokenizer behind four verbs. Encoding and decoding may run in different threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, source: str | Path) -> Tokenizer:
        """The tokenizer beside a model. Raises UnsupportedModel when there is none that can be used."""
        try:
            return cls(AutoTokenizer.from_pretrained(source))
        except (OSError, ValueError, ImportError) as error:
            raise UnsupportedModel(
                f"the model at {str(source)!r} has no usable tokenizer: {error}; "
                "save one beside it with tokenizer.save_pretrained()"
            ) from error

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return bool(self._tokenizer.chat_template)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer knows one."""
        token: int | None = self._tokenizer.eos_token_id
        return token

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with the special tokens the model expects around it."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation, up to where the assistant answers. Raises MalformedRequest.

        ``template_arguments`` are what the model's template takes besides (vLLM's ``chat_template_kwargs``).
        """
        if not self.has_chat_template:
            raise MalformedRequest(
                "the model has no chat template; send a prompt to /v1/completions instead", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(template_arguments or {}),
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise MalformedRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones left out. Incomplete characters become U+FFFD."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
