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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is told how long to take has that long besides what every test has."""
    seconds = float(config.getoption("--churn", 3.0)) + float(config.getini("timeout") or 0)
    for item in items:
        if item.path.name == "test_store_churn.py":
            item.add_marker(pytest.mark.timeout(seconds))
