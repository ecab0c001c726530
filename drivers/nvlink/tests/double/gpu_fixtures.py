"""Fixtures of tests with one engine of this process, over a double of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_double import installed
from cuda_memory import Gpu, gpu

from mooncake_transfer import TransferConfig, TransferEngine

__all__ = ["config", "device", "engine", "library"]


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A double; its settings are the test's parameter."""
    with installed(**getattr(request, "param", {})) as library:
        yield library


@pytest.fixture
def device(library: Path) -> Gpu:
    """Its GPUs as this process uses them."""
    return gpu(str(library.parent))


@pytest.fixture
def engine(library: Path, device: Gpu) -> Iterator[TransferEngine]:
    """An engine of this process; nothing of it is left, and no rule of CUDA was broken."""
    before = [device.count(what) for what in ("mappings", "streams", "events", "imports")]
    with TransferEngine(config(library)) as engine:
        yield engine
    assert [device.count(what) for what in ("mappings", "streams", "events", "imports")] == before
    assert device.violation() == ""


def config(library: Path, **options: Any) -> TransferConfig:
    """Settings of an engine that has only this driver, over this double."""
    settings = {name: options.pop(name) for name in list(options) if name in ("host", "name")}
    given = {"nvlink": {"library": str(library), **options}}
    return TransferConfig(drivers=("nvlink",), driver_options=given, **settings)
