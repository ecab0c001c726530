"""The model: any causal language model that transformers loads and whose state is keys and values per token.

This package has no model code. It loads the model, learns the shape of its cache by running it on two tokens,
and calls its ``forward`` with a cache of our own class.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.utils import logging as transformers_logging

from mooncake_transformers._errors import DeviceUnavailable, UnknownModel, UnsupportedModel
from mooncake_transformers.config import DEFAULT_MODEL, WorkerConfig
from mooncake_transformers.default_model import DEFAULT_MODEL_NAME, ensure_default_model
from mooncake_transformers.fingerprint import model_fingerprint
from mooncake_transformers.kv_cache import ContiguousLayer, SequenceCache
from mooncake_transformers.kv_layout import KVLayout, LayerShape
from mooncake_transformers.tokenizer import Tokenizer

__all__ = ["CausalModel", "load_model"]

logger = logging.getLogger(__name__)
# What a model without a stated context length gets (ALiBi models, for example).
FALLBACK_CONTEXT_TOKENS = 32768


@dataclass(frozen=True)
class CausalModel:
    """A loaded model. ``forward`` is to be called by one thread at a time.

    Attributes:
        name: what clients call it.
        fingerprint: equal for equal weights and configuration, wherever they were loaded from.
        layers: cache shape of every layer; None where a layer keeps none.
        context_tokens: longest sequence the model was made for.
        eos_token_ids: tokens that end an answer.
        vocabulary: number of token ids the model has embeddings for.
    """

    name: str
    fingerprint: str
    tokenizer: Tokenizer
    layers: tuple[LayerShape | None, ...]
    dtype: torch.dtype
    device: torch.device
    context_tokens: int
    eos_token_ids: frozenset[int]
    vocabulary: int
    module: Any
    cache_argument: str
    keeps_last_logits: bool

    def layout(self, block_tokens: int) -> KVLayout:
        """The layout of this model's KV blocks."""
        return KVLayout(self.layers, self.dtype, block_tokens)

    def new_cache(self, capacity_tokens: int) -> SequenceCache:
        """An empty cache with room for ``capacity_tokens`` before it has to grow."""
        return _new_cache([shape is not None for shape in self.layers], capacity_tokens)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], cache: SequenceCache) -> torch.Tensor:
        """Compute ``token_ids`` behind what ``cache`` holds; returns the last one's logits, ``[vocabulary]``,
        float32, CPU.
        """
        arguments: dict[str, Any] = {self.cache_argument: cache, "use_cache": True}
        if self.keeps_last_logits:
            arguments["logits_to_keep"] = 1
        input_ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.device)
        logits: torch.Tensor = self.module(input_ids=input_ids, **arguments).logits
        return logits[0, -1].float().cpu()


def load_model(config: WorkerConfig) -> CausalModel:
    """Load the model ``config`` names.

    Raises DeviceUnavailable, UnknownModel, UnsupportedModel, DefaultModelUnavailable.
    """
    started_s = time.monotonic()
    _check_device(config.device)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.model == DEFAULT_MODEL:
        source, name = str(ensure_default_model()), DEFAULT_MODEL_NAME
    else:
        source, name = config.model, Path(config.model).name if Path(config.model).is_dir() else config.model
    hf_config = _load_config(source)
    module = _load_weights(source, hf_config, config)
    parameters = inspect.signature(module.forward).parameters
    cache_argument = _cache_argument(parameters, source)
    layers = _probe_layers(module, cache_argument, source)
    tokenizer = Tokenizer.load(source)
    dtype = _cache_dtype(module)
    model = CausalModel(
        name=config.served_name or name,
        fingerprint=model_fingerprint(module),
        tokenizer=tokenizer,
        layers=layers,
        dtype=dtype,
        device=module.device,
        context_tokens=_context_tokens(module.config),
        eos_token_ids=_eos_token_ids(module, tokenizer),
        vocabulary=module.get_input_embeddings().weight.shape[0],
        module=module,
        cache_argument=cache_argument,
        keeps_last_logits="logits_to_keep" in parameters,
    )
    logger.info(
        "loaded %s (%s, %s, attention %s) in %.1f s", model.name, dtype, model.device,
        getattr(module.config, "_attn_implementation", "?"), time.monotonic() - started_s,
    )  # fmt: skip
    return model


def _check_device(name: str) -> None:
    """Raise DeviceUnavailable unless torch can compute on the device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(
            f"{name!r} is no torch device: {_first_line(error)}; use for example --device cpu or cuda:0"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable(
            f"the device {name!r} is not there: torch {torch.__version__} finds no CUDA here; use --device "
            "cpu, or install NVIDIA's driver and a torch built with CUDA"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceUnavailable(
            f"the device {name!r} is not there: torch finds {torch.cuda.device_count()} CUDA devices, "
            "counted from cuda:0"
        )


def _load_config(source: str) -> Any:
    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UnknownModel(
            f"the folder {source!r} has no config.json; point --model at a folder saved by save_pretrained()"
        )
    if not folder.is_dir() and (source.startswith(("/", ".", "~")) or source.count("/") > 1):
        raise UnknownModel(
            f"there is no folder {source!r}; give a folder, a hub id such as 'org/name', or 'default'"
        )
    try:
        hf_config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UnknownModel(
            f"no model {source!r}: {_first_line(error)}. Check the name; without network, give a local "
            "folder, or a model that the hub's cache holds already"
        ) from error
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{source!r} is an encoder-decoder; only decoder-only models can be served")
    return hf_config


def _load_weights(source: str, hf_config: Any, config: WorkerConfig) -> Any:
    options: dict[str, Any] = {} if config.attention == "auto" else {"attn_implementation": config.attention}
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{source!r} is a {hf_config.model_type!r}; transformers has no causal language model for it"
        )
    try:
        module = AutoModelForCausalLM.from_pretrained(source, config=hf_config, dtype=dtype, **options)
    except (OSError, ValueError, ImportError) as error:
        raise UnknownModel(f"the weights of {source!r} cannot be loaded: {_first_line(error)}") from error
    placed: Any = module
    return placed.to(config.device).eval().requires_grad_(False)


def _cache_argument(parameters: Any, source: str) -> str:
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModel(f"the model {source!r} takes no KV cache, so its state cannot be kept in blocks")


def _new_cache(keeps: Sequence[bool], capacity_tokens: int) -> SequenceCache:
    make_dummy: Any = DummyLayer
    return SequenceCache([ContiguousLayer(capacity_tokens) if kept else make_dummy() for kept in keeps])


def _probe_layers(module: Any, cache_argument: str, source: str) -> tuple[LayerShape | None, ...]:
    """Run the model on two tokens and see what each layer put into its cache."""
    template = DynamicCache(config=module.config).layers
    for number, layer in enumerate(template):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            raise UnsupportedModel(
                f"layer {number} of {source!r} keeps a recurrent state ({type(layer).__name__}), "
                "not keys and values per token; such models cannot be served by blocks"
            )
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer):
            raise UnsupportedModel(
                f"layer {number} of {source!r} has a cache this worker does not know: {type(layer).__name__}"
            )
    cache = _new_cache([type(layer) is not DummyLayer for layer in template], 2)
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=module.device)
    try:
        with torch.inference_mode():
            module(input_ids=tokens, **{cache_argument: cache}, use_cache=True)
    # The boundary to anybody's model code.
    except Exception as error:
        logger.exception("the model %s fails on two tokens", source)
        raise UnsupportedModel(
            f"the model {source!r} fails on a plain prompt: {type(error).__name__}: {error}"
        ) from error
    shapes = tuple(_shape_of(layer) for layer in cache.layers)
    if all(shape is None for shape in shapes):
        raise UnsupportedModel(
            f"the model {source!r} put nothing into its KV cache, so its state cannot be kept in blocks"
        )
    return shapes


def _shape_of(layer: object) -> LayerShape | None:
    if not isinstance(layer, ContiguousLayer) or layer.key_buffer is None or layer.value_buffer is None:
        return None
    return LayerShape(*layer.key_buffer.shape[1:], *layer.value_buffer.shape[1:])


def _cache_dtype(module: Any) -> torch.dtype:
    dtype: torch.dtype = module.dtype
    return dtype


def _context_tokens(hf_config: Any) -> int:
    text_config = hf_config.get_text_config(decoder=True)
    stated = getattr(text_config, "max_position_embeddings", None)
    return int(stated) if stated else FALLBACK_CONTEXT_TOKENS


def _eos_token_ids(module: Any, tokenizer: Tokenizer) -> frozenset[int]:
    stated = [module.config.get_text_config(decoder=True).eos_token_id, tokenizer.eos_token_id]
    if module.generation_config is not None:
        stated.append(module.generation_config.eos_token_id)
    tokens: set[int] = set()
    for entry in stated:
        tokens.update(entry if isinstance(entry, list | tuple) else [] if entry is None else [entry])
    return frozenset(tokens)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")
