"""One cluster for all tests of this folder: store, prefill and decode worker, conductor, a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from mooncake_transformers.cluster.testing import ServedCluster, save_chat_model
from mooncake_transformers.demo.reference import WholeModel


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("system") / "tiny-chat")


@pytest.fixture(scope="session")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    # Leaving the context is a test of its own: Ctrl-C ends it with status 0 and nothing is left.
    with ServedCluster(model_folder, tmp_path_factory.mktemp("serve"), "--threads", "1") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(served: ServedCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="session")
def whole_model(model_folder: Path) -> WholeModel:
    return WholeModel(str(model_folder), dtype="float32", device="cpu", threads=1)
