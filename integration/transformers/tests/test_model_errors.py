from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, MambaConfig, MambaForCausalLM, T5Config, ViTConfig

from mooncake_transformers._errors import DeviceUnavailable, UnknownModel, UnsupportedModel
from mooncake_transformers.config import WorkerConfig
from mooncake_transformers.model import load_model
from mooncake_transformers.testing import save_tiny_model


def load(source: object) -> None:
    load_model(WorkerConfig(model=str(source)))


def test_a_folder_that_is_not_there_is_named_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no folder '.*missing'.*hub id"):
        load(tmp_path / "missing")


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"has no config\.json"):
        load(tmp_path)


def test_a_hub_model_that_cannot_be_had_is_unknown_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UnknownModel, match=r"'mooncake-test/no-such-model'.*without network, give a local folder"
    ):
        load("mooncake-test/no-such-model")


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(UnknownModel, match="weights"):
        load(tmp_path)


def test_a_config_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-kind"}))
    with pytest.raises(UnknownModel, match="no-such-kind"):
        load(tmp_path)


def test_an_encoder_decoder_is_unsupported(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load(tmp_path)


def test_a_model_that_is_no_language_model_is_unsupported(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="no causal language model"):
        load(tmp_path)


def test_a_recurrent_model_is_unsupported(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"recurrent state|takes no KV cache"):
        load(tmp_path)


def test_cuda_where_there_is_none_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match=r"'cuda:0' is not there.*--device cpu"):
        load_model(WorkerConfig(model=str(tmp_path / "missing"), device="cuda:0"))


def test_a_cuda_device_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(DeviceUnavailable, match=r"'cuda:2'.*2 CUDA devices"):
        load_model(WorkerConfig(model=str(tmp_path / "missing"), device="cuda:2"))


def test_what_is_no_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match=r"'abacus' is no torch device"):
        load_model(WorkerConfig(model=str(tmp_path / "missing"), device="abacus"))


def test_a_model_without_a_tokenizer_is_unsupported(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        load(tmp_path)
