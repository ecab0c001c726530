"""What the engine is told of the driver, and which options it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_driver_shm import ShmOptions, plugin
from mooncake_driver_shm.options import render
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import Available, Unavailable


def test_the_driver_is_found_and_goes_before_the_network() -> None:
    (info,) = plugin.mooncake_transfer_drivers()
    assert (info.name, info.kinds, info.priority) == ("shm", frozenset({"dram"}), 100)
    assert isinstance(info.probe(), Available)


def test_describing_the_driver_does_not_load_its_core() -> None:
    code = (
        "import sys; from mooncake_driver_shm import plugin; plugin.mooncake_transfer_drivers()[0].probe();"
        "assert 'mooncake_driver_shm._core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_system_that_does_not_tell_its_boot_id_cannot_use_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plugin, "BOOT_ID", tmp_path / "boot_id")
    found = plugin.probe()
    assert isinstance(found, Unavailable)
    assert "mount /proc" in found.reason


def test_every_option_is_rendered_and_taken_by_the_core() -> None:
    options = render({"workers": 3, "allow_other_users": True, "answer_timeout_s": 0.5})
    assert set(options) == set(ShmOptions.__struct_fields__)
    assert options["workers"] == "3"
    assert options["allow_other_users"] == "true"
    assert options["answer_timeout_s"] == "0.5"
    with TransferEngine(TransferConfig(drivers=("shm",), driver_options={"shm": {"workers": 3}})) as engine:
        assert engine.drivers["shm"].usable


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 65}, "workers is 65; it must be within 0..64"),
        ({"workers": "many"}, "Expected `int`"),
        ({"color": "red"}, "known options: workers, inline_bytes"),
        ({"chunk_bytes": 1}, "chunk_bytes is 1"),
        ({"answer_timeout_s": 0}, "answer_timeout_s is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(options)
