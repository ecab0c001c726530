"""Regions of engines at other hosts: namespaces that both reach, matched by what they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_driver_nvmeof import _core
from mooncake_transfer import RailConfig, TransferConfig
from mooncake_transfer.testing import PeerProcess, digest, pattern
from mooncake_transfer.testing.namespaces import NetworkPair, NetworkUnavailable
from mooncake_transfer.testing.peer_process import PeerProcessError

DEADLINE_S = 20.0
NBYTES = 1 << 20
ALL = [[0, 0, NBYTES]]
UNREACHABLE = 5  # mc_status


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[PeerProcess, PeerProcess]]:
    """Two engines in network namespaces of their own: for the driver, two hosts."""
    try:
        network = NetworkPair()
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with network:

        def start(end: int) -> PeerProcess:
            host = network.addresses[end]
            options: dict[str, str | int | float | bool] = {"host": host, "fence_s": 0.0}
            config = TransferConfig(
                drivers=("nvmeof",),
                host=host,
                driver_options={"nvmeof": options},
                rails=RailConfig(attempts=1),
            )
            paths = f"PYTHONPATH={Path(__file__).parent}"
            return PeerProcess(
                config, prefix=[*network.inside(end), "env", paths, f"NVME_TARGET_HOST={host}"]
            )

        with start(0) as near, start(1) as far:
            yield near, far


def test_a_namespace_that_both_hosts_reach_is_used_until_the_key_is_taken_back(
    hosts: tuple[PeerProcess, PeerProcess],
) -> None:
    near, far = hosts
    owned = far.allocate(NBYTES, 1, kind="served_namespace:ServedNamespace")
    source = near.allocate(NBYTES, 2)
    granted = far.grant(owned.number, "rw")
    near.write(source.number, granted, ALL, DEADLINE_S)
    assert far.digest(owned.number) == digest(pattern(2, NBYTES))
    far.revoke(owned.number, granted, DEADLINE_S)
    near.fill(source.number, 3)
    with pytest.raises(PeerProcessError) as caught:
        near.write(source.number, granted, ALL, DEADLINE_S)
    assert caught.value.kind == "RegionRefused"
    assert far.digest(owned.number) == digest(pattern(2, NBYTES))


def test_a_file_of_another_host_is_refused_with_the_reason(hosts: tuple[PeerProcess, PeerProcess]) -> None:
    near, far = hosts
    owned, source = far.allocate(NBYTES, 1, kind="file"), near.allocate(NBYTES, 2)
    with pytest.raises(PeerProcessError, match="is a file of its host, which no other host reaches"):
        near.write(source.number, owned.descriptor, ALL, DEADLINE_S)
    assert far.digest(owned.number) == digest(pattern(1, NBYTES))


ZEROS = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """What /sys/block looks like: a disk, two namespaces, and the path of one of them."""

    def add(name: str, **files: str) -> None:
        (tmp_path / name / "device").mkdir(parents=True)
        for file, text in files.items():
            (tmp_path / name / file.replace("__", "/")).write_text(text + "\n")

    add("vda", size="100")
    add(
        "nvme0n1",
        device__subsysnqn="nqn.a",
        nsid="1",
        uuid="11111111-2222-3333-4444-555555555555",
        nguid=ZEROS,
    )
    add(
        "nvme1n2", device__subsysnqn="nqn.b", nsid="2", uuid=ZEROS, nguid=ZEROS, eui="00 1b 44 8b 4a 2c 1d 7e"
    )
    add("nvme2n1", device__subsysnqn="nqn.c", nsid="1")
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("nqn=nqn.other\nnsid=9\nuuid=11111111-2222-3333-4444-555555555555\n", "nvme0n1"),
        ("nqn=nqn.other\nnsid=9\neui=00 1b 44 8b 4a 2c 1d 7e\n", "nvme1n2"),
        ("nqn=nqn.c\nnsid=1\n", "nvme2n1"),
    ],
)
def test_a_namespace_is_found_by_what_it_is(blocks: Path, wanted: str, name: str) -> None:
    assert _core.find_namespace(str(blocks), wanted) == (0, "", name)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        # The same name and number, and yet another namespace.
        ("nqn=nqn.a\nnsid=1\nuuid=99999999-2222-3333-4444-555555555555\n", "with UUID 99999999-2222"),
        ("nqn=nqn.b\nnsid=2\neui=ff 1b 44 8b 4a 2c 1d 7e\n", "with EUI-64 ff 1b"),
        ("nqn=nqn.c\nnsid=2\n", "with number 2; connect it: mooncake nvmeof connect nqn.c"),
    ],
)
def test_a_namespace_that_is_not_here_is_named_with_the_remedy(
    blocks: Path, wanted: str, reason: str
) -> None:
    status, said, name = _core.find_namespace(str(blocks), wanted)
    assert (status, name) == (UNREACHABLE, "")
    assert reason in said
