"""From a client's body to what is to be generated: tokens, limits, sampling, and the request's part in a P/D
pair.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from mooncake_transformers._errors import ContextLengthExceeded, MalformedRequest, ModelNotServed, WrongRole
from mooncake_transformers.config import Role
from mooncake_transformers.generation import Generation, RemotePrefill
from mooncake_transformers.model import CausalModel
from mooncake_transformers.requests import (
    ChatRequest,
    CompletionRequest,
    KVTransferParams,
    TokenizeRequest,
    prompt_of,
    template_messages,
)
from mooncake_transformers.sampling import Sampling

__all__ = ["Planner"]

# OpenAI's default for plain completions; a chat answer may fill the context.
COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class Planner:
    """Checks requests against one model and role. Its methods may be called from any thread.

    Attributes:
        max_model_len: longest sequence, prompt and answer together.
    """

    model: CausalModel
    role: Role
    max_model_len: int

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotServed unless ``name`` is the served model; None takes it for granted."""
        if name is not None and name != self.model.name:
            raise ModelNotServed(
                f"the model {name!r} is not served here; this worker has {self.model.name!r}", param="model"
            )

    def tokens(self, request: CompletionRequest | ChatRequest | TokenizeRequest) -> list[int]:
        """The prompt's tokens. Raises MalformedRequest, UnsupportedParameter."""
        tokenizer = self.model.tokenizer
        if isinstance(request, CompletionRequest):
            prompt = prompt_of(request)
            return tokenizer.encode(prompt) if isinstance(prompt, str) else self._known(prompt)
        if isinstance(request, TokenizeRequest) and request.prompt is not None:
            if request.messages is not None:
                raise MalformedRequest("send a prompt or messages, not both", param="prompt")
            return tokenizer.encode(request.prompt)
        if request.messages is None:
            raise MalformedRequest("a prompt or messages are needed", param="prompt")
        return tokenizer.encode_chat(
            template_messages(request.messages),
            add_generation_prompt=request.add_generation_prompt,
            template_arguments=request.chat_template_kwargs,
        )

    def plan(self, request: CompletionRequest | ChatRequest) -> Generation:
        """What is to be generated.

        Raises ModelNotServed, MalformedRequest, ContextLengthExceeded, WrongRole.
        """
        self.check_model(request.model)
        token_ids = self.tokens(request)
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        room = self.max_model_len - len(token_ids)
        if not token_ids:
            raise MalformedRequest("the prompt is empty: it has no token", param=param)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens; with an answer of at least one, at most "
                f"{self.max_model_len} fit into the context; shorten it",
                param=param,
            )
        wanted = request.token_limit
        if wanted is None:
            wanted = room if isinstance(request, ChatRequest) else COMPLETION_TOKENS
        return Generation(
            token_ids=token_ids,
            sampling=Sampling(
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                seed=secrets.randbits(63) if request.seed is None else request.seed,
            ),
            # An answer that would not fit ends where the context does.
            max_tokens=min(wanted, room),
            stop=request.stop_strings,
            ignore_eos=request.ignore_eos,
            remote=self._remote(request.kv_transfer_params),
        )

    def transfer_id(self, params: KVTransferParams | None) -> str | None:
        """The transfer to hold the prompt under, when this request is a prefill for another worker. Raises
        WrongRole.
        """
        if params is None or not params.do_remote_decode:
            return None
        if self.role == "decode":
            raise WrongRole(
                "this worker only decodes; send do_remote_decode to a prefill worker",
                param="kv_transfer_params",
            )
        return params.transfer_id or secrets.token_hex(16)

    def _remote(self, params: KVTransferParams | None) -> RemotePrefill | None:
        if params is None or not params.do_remote_prefill:
            return None
        if self.role == "prefill":
            raise WrongRole(
                "this worker only prefills; send do_remote_prefill to a decode worker",
                param="kv_transfer_params",
            )
        for name in ("transfer_id", "remote_host", "remote_port"):
            if getattr(params, name) is None:
                raise MalformedRequest(f"do_remote_prefill needs {name}", param=f"kv_transfer_params.{name}")
        host = f"[{params.remote_host}]" if ":" in str(params.remote_host) else params.remote_host
        return RemotePrefill(f"{host}:{params.remote_port}", str(params.transfer_id))

    def _known(self, token_ids: list[int]) -> list[int]:
        for place, token in enumerate(token_ids):
            if token >= self.model.vocabulary:
                raise MalformedRequest(
                    f"token id {token} at place {place} is not one of the model's {self.model.vocabulary}",
                    param="prompt",
                )
        return token_ids
