"""What the tests of faults share."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_transformers.cluster.testing import save_chat_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One for each module: leftover processes are found by its path.
    return save_chat_model(tmp_path_factory.mktemp("faults") / "tiny-chat")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--churn", type=float, default=3.0, help="seconds that the store's keys are churned for")
