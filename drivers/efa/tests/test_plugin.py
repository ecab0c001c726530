"""What the engine is told of the driver, and why it says that it cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fabric_double import config_over_the_double, double_library

from mooncake_driver_efa import plugin
from mooncake_transfer import TransferEngine
from mooncake_transfer.hooks import Available, Unavailable
from mooncake_transfer.testing.compiling import compiled


def reason(options: dict[str, object]) -> str:
    """Why the probe says no."""
    found = plugin.probe(options)
    assert isinstance(found, Unavailable)
    return found.reason


def made(folder: Path, text: str) -> str:
    """A library of this source."""
    source = folder / "made.cpp"
    source.write_text(text)
    return str(compiled("libfabric.so.1", [source], "-shared"))


def test_describing_the_driver_loads_neither_its_core_nor_libfabric() -> None:
    code = (
        "import sys; from mooncake_driver_efa import plugin; plugin.mooncake_transfer_drivers();"
        "assert 'mooncake_driver_efa._core' not in sys.modules;"
        "assert 'libfabric' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_probe_without_libfabric_says_where_it_looked_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "LIBRARIES", ("libfabric-of-nobody.so.1", "/nowhere/libfabric.so.1"))
    said = reason({})
    assert "libfabric-of-nobody.so.1: cannot open shared object" in said
    assert "/nowhere/libfabric.so.1: cannot open shared object" in said
    assert "install libfabric 1.17 or newer" in said
    assert "name its file with option library" in said


def test_a_probe_refuses_a_libfabric_that_is_too_old(tmp_path: Path) -> None:
    old = made(tmp_path, 'extern "C" unsigned fi_version() { return 1 << 16 | 16; }')
    assert f"{old} is version 1.16, 1.17 is needed; install libfabric" in reason({"library": old})


def test_a_probe_refuses_what_is_no_libfabric(tmp_path: Path) -> None:
    other = made(tmp_path, 'extern "C" int something_else() { return 0; }')
    assert "is no libfabric: it has no fi_version" in reason({"library": other})


def test_the_option_alone_says_where_libfabric_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(plugin, "LIBRARIES", ())
    library = str(double_library())
    found = plugin.probe({"library": library})
    assert isinstance(found, Available)
    assert found.devices[0].startswith(f"{library} ")
    with TransferEngine(config_over_the_double()) as engine:
        assert engine.drivers["efa"].devices == found.devices
