"""What the engine is told of the driver, and which options it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_driver_nvmeof import NvmeofOptions, options, plugin
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import Available, Unavailable


def test_the_driver_is_found_and_takes_memory_and_files() -> None:
    (info,) = plugin.mooncake_transfer_drivers()
    assert (info.name, info.kinds) == ("nvmeof", frozenset({"dram", "cuda", "file", "block"}))
    assert isinstance(info.probe(), Available)


def test_describing_the_driver_does_not_load_its_core() -> None:
    code = (
        "import sys; from mooncake_driver_nvmeof import plugin;"
        "plugin.mooncake_transfer_drivers()[0].probe();"
        "assert 'mooncake_driver_nvmeof._core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_system_without_proc_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mooncake_transfer.hooks.BOOT_ID", tmp_path / "boot_id")
    found = plugin.probe()
    assert isinstance(found, Unavailable)
    assert "mount /proc" in found.reason


def test_every_option_is_rendered() -> None:
    rendered = options.render({"durable": True, "in_flight": 7, "host_nqn": "nqn.x"})
    assert set(rendered) == set(NvmeofOptions.__struct_fields__)
    assert (rendered["durable"], rendered["in_flight"], rendered["host_nqn"]) == ("true", "7", "nqn.x")


def test_a_host_has_the_name_that_nvme_cli_gave_it_or_one_that_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "hostnqn"
    monkeypatch.setattr(options, "HOST_NQN_FILE", file)
    made = options.default_host_nqn()
    assert made.startswith("nqn.2014-08.org.nvmexpress:uuid:")
    assert options.default_host_nqn() == made
    file.write_text("nqn.2014-08.org.example:host\n")
    assert options.render({})["host_nqn"] == "nqn.2014-08.org.example:host"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"io": "aio"}, "Invalid enum value 'aio'"),
        ({"workers": 0}, "workers is 0; it must be within 1..256"),
        ({"color": "red"}, "known options: io, direct"),
        ({"chunk_bytes": 1}, "chunk_bytes is 1"),
        ({"host_nqn": "n" * 224}, "host_nqn has 224 letters"),
    ],
)
def test_options_that_cannot_work_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.render(given)
