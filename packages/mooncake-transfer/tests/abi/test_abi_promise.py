"""The promise of the driver ABI: an older minor works, another major is refused with the reason."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from loopback import CURRENT, HERE, compile_driver, offered

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import DriverUnavailable

CONFIG = TransferConfig(drivers=("loopback",))
OLD = sorted(path.name for path in HERE.iterdir() if (path / "mooncake_driver.h").exists())
GROWING = ("mc_driver_v1", "mc_memory", "mc_caps", "mc_stats")


def header_of_the_future(folder: Path) -> Path:
    """Today's header, but with minor 99, and every struct that may grow has grown at its end."""
    text = (CURRENT / "mooncake_driver.h").read_text()
    text, minors = re.subn(r"(#define MC_ABI_MINOR) \d+u", r"\1 99u", text)
    assert minors == 1
    for struct in GROWING:
        text, grown = re.subn(
            rf"(struct {struct} {{.*?\n)(}})", r"\1  uint64_t future;\n\2", text, count=1, flags=re.DOTALL
        )
        assert grown == 1, struct
    future = folder / "future"
    future.mkdir()
    (future / "mooncake_driver.h").write_text(text)
    return future


def check_that_bytes_move(library: ctypes.CDLL) -> None:
    with offered(library), TransferEngine(CONFIG) as owner, TransferEngine(CONFIG) as user:
        theirs, ours = owner.allocate(1 << 20), user.allocate(1 << 20)
        theirs.view()[:] = bytes(range(256)) * 4096
        remote = user.import_region(theirs.descriptor())
        user.read(ours, remote, [[0, 0, 1 << 20]]).wait(timeout_s=10)
        assert bytes(ours.view()) == bytes(theirs.view())
        ours.view()[:5] = b"hello"
        user.write(ours, remote, [[0, 100, 5]]).wait(timeout_s=10)
        assert bytes(theirs.view()[100:105]) == b"hello"
        assert user.stats()["loopback"]["faults"] == 0


def test_every_earlier_minor_is_tested() -> None:
    minor = re.search(r"#define MC_ABI_MINOR (\d+)u", (CURRENT / "mooncake_driver.h").read_text())
    assert minor is not None
    assert [f"1.{n}" for n in range(int(minor[1]))] == OLD, "keep the header of each minor when it grows"


@pytest.mark.parametrize("version", [*OLD, "today's"])
def test_a_driver_built_against_an_older_minor_works(version: str, tmp_path: Path) -> None:
    check_that_bytes_move(compile_driver(tmp_path, CURRENT if version == "today's" else HERE / version))


def test_a_driver_that_is_newer_than_the_engine_works(tmp_path: Path) -> None:
    library = compile_driver(tmp_path, header_of_the_future(tmp_path), "FUTURE")
    check_that_bytes_move(library)
    # It was told how large the engine's structs are, and so knows what is not in them.
    today = compile_driver(tmp_path, CURRENT)
    check_that_bytes_move(today)
    for size in ("loopback_memory_size", "loopback_caps_size"):
        assert getattr(library, size)() == getattr(today, size)() > 0


def test_a_driver_of_1_0_has_no_keys_with_lesser_rights_and_says_so(tmp_path: Path) -> None:
    with offered(compile_driver(tmp_path, HERE / "1.0")), TransferEngine(CONFIG) as engine:
        region = engine.allocate(4096)
        with pytest.raises(DriverUnavailable, match="no keys with lesser rights"):
            region.grant("r")


@pytest.mark.parametrize(
    ("define", "reason"),
    [
        ("MAJOR=2u", r"ABI version 2, this engine 1; install versions of both that fit together"),
        ("MAJOR=0u", r"ABI version 0, this engine 1"),
        ("CUT", r"function table has \d+ bytes, \d+ are needed; install a newer driver"),
        ("HOLE", r"function table has no poll\(\)"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_reason(
    define: str, reason: str, tmp_path: Path
) -> None:
    with offered(compile_driver(tmp_path, CURRENT, define)), pytest.raises(DriverUnavailable, match=reason):
        TransferEngine(CONFIG)
