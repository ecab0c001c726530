"""Options are checked before anything starts; each device becomes an endpoint at its NUMA node."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_driver_efa import devices
from mooncake_driver_efa.options import endpoints, render
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import Unavailable


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two EFA devices, a NIC of another vendor, and one whose files cannot be read."""
    for name, vendor, node in (("efa_1", "0x1d0f", "1"), ("efa_0", "0x1d0f", "0"), ("mlx5_0", "0x15b3", "0")):
        folder = tmp_path / name / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "numa_node").write_text(f"{node}\n")
    (tmp_path / "broken").mkdir()
    monkeypatch.setattr(devices, "SYS_INFINIBAND", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("sysfs")
def test_every_efa_device_is_an_endpoint_at_its_numa_node() -> None:
    found = endpoints({})
    assert not isinstance(found, Unavailable)
    assert [(one.device, one.numa_node) for one in found] == [("efa_0", 0), ("efa_1", 1)]
    assert [one.options["domain"] for one in found] == ["efa_0", "efa_1"]


@pytest.mark.usefixtures("sysfs")
def test_a_device_that_is_named_is_the_only_one() -> None:
    found = endpoints({"domain": "efa_1"})
    assert not isinstance(found, Unavailable)
    assert [(one.device, one.numa_node) for one in found] == [("efa_1", 1)]


def test_without_a_device_the_reason_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "SYS_INFINIBAND", tmp_path / "none")
    found = endpoints({})
    assert isinstance(found, Unavailable)
    assert "option provider" in found.reason


def test_another_provider_needs_no_device_of_amazon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "SYS_INFINIBAND", tmp_path / "none")
    found = endpoints({"provider": "tcp;ofi_rxm", "domains": "eth0, eth1"})
    assert not isinstance(found, Unavailable)
    assert [one.options["domain"] for one in found] == ["eth0", "eth1"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"provider": ""}, "provider"),
        ({"domain": "a", "domains": "b"}, "domains"),
        ({"domains": "a,,b"}, "domains"),
        ({"domains": "a,a"}, "domains"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"endpoints": 5000}, "endpoints"),
        ({"dead_peer_timeout_s": 0.0}, "dead_peer_timeout_s"),
        ({"spin": 1}, "spin"),
    ],
)
def test_what_cannot_work_is_a_config_error_that_names_it(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        render(given)
