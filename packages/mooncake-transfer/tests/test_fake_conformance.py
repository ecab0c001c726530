"""The fake driver passes the suite of all drivers, whose peers are in its own process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from mooncake_transfer import TransferConfig
from mooncake_transfer.testing import DriverConformance, Quirks
from mooncake_transfer.testing.fake import FakeFabric

MAX_OP_BYTES = 1 << 20


class Fake(DriverConformance):
    """The suite over a fabric of its own; each engine is a host of its own."""

    driver = "fake"
    options: ClassVar[dict[str, Any]] = {}
    _hosts = itertools.count()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def fabric(cls) -> Iterator[FakeFabric]:
        with FakeFabric() as fabric:
            yield fabric

    @classmethod
    def config(cls, **settings: Any) -> TransferConfig:
        options = {"fake": {"host": f"host{next(cls._hosts)}", **cls.options}}
        return TransferConfig(drivers=("fake",), driver_options=options, **settings)


class TestFake(Fake):
    """As it comes, and with notices."""

    quirks = Quirks(ordered=True, same_host_only=True, same_process_only=True, notices=True)
    options: ClassVar[dict[str, Any]] = {"notice_bytes": 512}


class TestNarrowFake(Fake):
    """With every limit that a driver may have."""

    quirks = Quirks(
        max_slice_bytes=MAX_OP_BYTES, alignment=64, same_host_only=True, same_process_only=True, notices=True
    )
    options: ClassVar[dict[str, Any]] = {
        "max_op_bytes": MAX_OP_BYTES,
        "alignment": 64,
        "inline_bytes": 4096,
        "queue_ops": 32,
        "notice_bytes": 64,
        "notice_room": 4,
        "in_flight_ops": 16,
        "in_flight_bytes": 4 * MAX_OP_BYTES,
    }
