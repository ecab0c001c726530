"""What the engine is told of the driver, which options it takes, and how it does without NIXL."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_driver_nixl import NixlOptions, library, plugin
from mooncake_driver_nixl.options import parse, render
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError, DriverUnavailable
from mooncake_transfer.hooks import Available, Unavailable

NIXL = library.find()

# Two engines of one process, which then ends as any program does.
PROGRAM = """
import sys
from mooncake_transfer import TransferConfig, TransferEngine
config = TransferConfig(host=sys.argv[1], drivers=("nixl",))
with TransferEngine(config) as one, TransferEngine(config) as other:
    source, place = one.allocate(1 << 20), other.allocate(1 << 20)
    other.read(place, other.import_region(source.descriptor()), [[0, 0, 1 << 20]]).wait(30)
"""


def test_the_driver_comes_before_sockets_and_moves_main_memory() -> None:
    (info,) = plugin.mooncake_transfer_drivers()
    assert (info.name, info.kinds, info.priority) == ("nixl", frozenset({"dram"}), 20)
    assert info.network


def test_the_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MODULES", ("no_such_nixl",))
    found = plugin.probe()
    assert isinstance(found, Unavailable)
    assert 'pip install "mooncake-driver-nixl[cu12]"' in found.reason


def test_the_probe_names_module_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MODULES", ("no_such_nixl", "msgspec"))
    monkeypatch.setattr(library, "PART", "structs.py")
    found = plugin.probe()
    assert isinstance(found, Available)
    (device,) = found.devices
    assert device.startswith("msgspec ")


def test_an_engine_that_has_only_this_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "MODULES", ("no_such_nixl",))
    with pytest.raises(DriverUnavailable, match="NIXL is not installed; pip install"):
        TransferEngine(TransferConfig(drivers=("nixl",)))


def test_describing_the_driver_does_not_load_nixl() -> None:
    code = (
        "import sys; from mooncake_driver_nixl import plugin; plugin.mooncake_transfer_drivers()[0].probe();"
        "assert not {'nixl', 'nixl_cu12', 'nixl_cu13'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_option_is_rendered_and_read_again() -> None:
    given = {"port": 7, "errors": "peer", "progress_thread": True, "answer_timeout_s": 0.5}
    options = render(given)
    assert set(options) == set(NixlOptions.__struct_fields__)
    assert parse(options) == NixlOptions(port=7, errors="peer", progress_thread=True, answer_timeout_s=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port is 65536; it must be within 0..65535"),
        ({"active_transfers": "many"}, "Expected `int`"),
        ({"color": "red"}, "known options: host, port"),
        ({"errors": "some"}, "errors"),
        ({"answer_timeout_s": 0}, "answer_timeout_s is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(options)


@pytest.mark.skipif(not NIXL, reason="NIXL is not installed")
@pytest.mark.parametrize("host", ["0.0.0.0", "::0"])
def test_an_address_that_no_peer_can_connect_to_is_refused(host: str) -> None:
    options = {"nixl": {"host": host}}
    with pytest.raises(DriverUnavailable, match="which peers cannot connect to; name one address"):
        TransferEngine(TransferConfig(drivers=("nixl",), driver_options=options))


@pytest.mark.skipif(not NIXL, reason="NIXL is not installed")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_program_that_used_the_driver_ends_cleanly_and_says_nothing(host: str) -> None:
    command = [sys.executable, "-c", PROGRAM, host]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, b""), ended.stderr.decode()


@pytest.mark.skipif(bool(NIXL), reason="NIXL is installed")
def test_without_nixl_loading_it_says_where_it_was_looked_for() -> None:
    assert all(importlib.util.find_spec(name) is None for name in library.MODULES)
    with pytest.raises(ImportError, match="looked for nixl_cu12, nixl_cu13, nixl"):
        library.load()


@pytest.mark.skipif(bool(NIXL), reason="NIXL is installed")
def test_a_module_that_only_has_the_name_is_not_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl.py").write_text("")
    (tmp_path / "nixl_cu13").mkdir()
    (tmp_path / "nixl_cu13" / "_api.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert library.find() == "nixl_cu13"
    (tmp_path / "nixl_cu13" / "_api.py").unlink()
    assert library.find() == ""
    assert isinstance(plugin.probe(), Unavailable)
