"""A file that another process still has when the time to give it back is over: the error says who it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import RegionBusy
from mooncake_transfer.memory import FileSource
from mooncake_transfer.testing import PeerProcess

DEADLINE_S = 20.0
NBYTES = 1 << 16


@pytest.mark.parametrize("way", ["close", "revoke"])
def test_who_has_not_let_go_is_named(tmp_path: Path, way: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(NBYTES))
    config = TransferConfig(drivers=("nvmeof",))
    with TransferEngine(config) as owner, PeerProcess(config) as user:
        region = owner.register(FileSource(path))
        key = region.grant("w")
        user.write(user.allocate(NBYTES, 3).number, key, [[0, 0, NBYTES]], DEADLINE_S)
        user.pause()
        whose = f"1 connections of peers, such as that of process {user.pid}, had not let go"
        with pytest.raises(RegionBusy, match=whose):
            region.close(0.1) if way == "close" else region.revoke(key, 0.1)
        user.resume()
        region.close(DEADLINE_S)
