from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_transformers.config import WorkerConfig
from mooncake_transformers.model import CausalModel, load_model
from mooncake_transformers.testing import save_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> CausalModel:
    return load_model(WorkerConfig(model=str(tiny_folder), dtype="float32", served_name="tiny"))
