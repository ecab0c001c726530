"""What the engine is told of the driver, and which options it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mooncake_driver_template import plugin
from mooncake_driver_template.options import render
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import Available


def test_the_driver_can_be_used_here() -> None:
    (info,) = plugin.mooncake_transfer_drivers()
    assert isinstance(info.probe(), Available)


def test_describing_the_driver_does_not_load_its_core() -> None:
    code = (
        "import sys; from mooncake_driver_template import plugin\n"
        "plugin.mooncake_transfer_drivers()[0].probe()\n"
        "assert 'mooncake_driver_template._core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_engine_takes_the_options() -> None:
    options = {"template": {"timeout_s": 0.5}}
    with TransferEngine(TransferConfig(drivers=("template",), driver_options=options)) as engine:
        assert engine.drivers["template"].usable


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"timeout_s": "long"}, {"color": "red"}])
def test_options_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        render(options)
