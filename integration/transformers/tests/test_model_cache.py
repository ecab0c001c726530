"""Tokens with blocks, chunks and reuse against the same model's own ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mooncake_transformers.config import WorkerConfig
from mooncake_transformers.kv_pool import KVPool
from mooncake_transformers.model import CausalModel, load_model
from mooncake_transformers.testing import TINY_ARCHITECTURES, save_tiny_model

NEW_TOKENS = 24


@pytest.fixture(scope="module", params=sorted(TINY_ARCHITECTURES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), request.param)
    return load_model(WorkerConfig(model=str(folder), dtype="float32"))


def prompt(tokens: int, seed: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, 256, (tokens,), generator=generator)]


def whole(model: CausalModel, token_ids: list[int]) -> list[int]:
    inputs = torch.tensor([token_ids])
    made = model.module.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return [int(token) for token in made[0, len(token_ids) :]]


def continued(
    model: CausalModel, logits: torch.Tensor, forward: Callable[[list[int]], torch.Tensor]
) -> list[int]:
    tokens = []
    for _ in range(NEW_TOKENS):
        tokens.append(int(logits.argmax()))
        logits = forward(tokens[-1:])
    return tokens


def pool_for(model: CausalModel, blocks: int = 20, block_tokens: int = 16) -> KVPool:
    layout = model.layout(block_tokens)
    return KVPool(layout, memoryview(bytearray(layout.block_bytes * blocks)))


def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole_model(model: CausalModel) -> None:
    token_ids = prompt(77)
    cache = model.new_cache(8)
    for begin in range(0, 77, 13):
        logits = model.forward(token_ids[begin : begin + 13], cache)
    assert continued(model, logits, lambda tokens: model.forward(tokens, cache)) == whole(model, token_ids)
    assert len(set(whole(model, token_ids))) > 3, "a constant answer would prove nothing"


def test_reused_blocks_and_a_computed_rest_give_the_tokens_of_the_whole_model(model: CausalModel) -> None:
    token_ids = prompt(77)
    pool = pool_for(model)
    first = model.new_cache(80)
    # The blocks come from a longer prompt with another end, as they do from a store.
    model.forward([*token_ids[:64], *prompt(16, seed=9)], first)
    blocks = pool.try_allocate(4)
    assert blocks is not None
    first.save(pool, blocks, 0)
    cache = model.new_cache(16)
    cache.load(pool, blocks, 64, model.device)
    logits = model.forward(token_ids[64:], cache)
    assert continued(model, logits, lambda tokens: model.forward(tokens, cache)) == whole(model, token_ids)


def test_decoding_from_fetched_blocks_with_a_partial_tail_gives_the_same_tokens(model: CausalModel) -> None:
    token_ids = prompt(75)
    sender, receiver = pool_for(model), pool_for(model)
    cache = model.new_cache(75)
    logits = model.forward(token_ids, cache)
    sent = sender.try_allocate(5)
    assert sent is not None
    cache.save(sender, sent, 0)
    # Other block numbers there, in another order.
    spare = receiver.try_allocate(9)
    assert spare is not None
    got = [spare[number] for number in (7, 0, 8, 3, 1)]
    size = sender.layout.block_bytes
    for source, target in zip(sent, got, strict=True):
        receiver.memory[target * size : (target + 1) * size] = sender.memory[
            source * size : (source + 1) * size
        ]
    fetched = model.new_cache(1)
    fetched.load(receiver, got, 75, model.device)
    assert continued(model, logits, lambda tokens: model.forward(tokens, fetched)) == whole(model, token_ids)


def test_blocks_written_while_decoding_are_those_of_the_longer_prompt(model: CausalModel) -> None:
    token_ids = prompt(90)
    pool = pool_for(model)
    grown = model.new_cache(1)
    model.forward(token_ids[:40], grown)
    for token in token_ids[40:]:
        model.forward([token], grown)
    blocks = pool.try_allocate(3)
    assert blocks is not None
    grown.save(pool, blocks, 2)
    loaded = model.new_cache(90)
    model.forward(token_ids, loaded)
    again = pool.try_allocate(3)
    assert again is not None
    loaded.save(pool, again, 2)
    for views in pool.views:
        assert views is not None
        torch.testing.assert_close(views.keys[blocks], views.keys[again], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(views.values[blocks], views.values[again], rtol=1e-4, atol=1e-4)


def test_equal_models_have_equal_fingerprints_and_others_do_not(tmp_path: Path) -> None:
    def fingerprint(name: str, seed: int, architecture: str = "llama") -> str:
        folder = save_tiny_model(tmp_path / name, architecture, seed)
        return load_model(WorkerConfig(model=str(folder))).fingerprint

    assert fingerprint("one", 1) == fingerprint("copy", 1)
    assert len({fingerprint("one", 1), fingerprint("two", 2), fingerprint("qwen", 1, "qwen2")}) == 3
