"""Options: checked before anything starts, and the ports that they choose."""

from __future__ import annotations

import pytest

from mooncake_driver_verbs.devices import Port
from mooncake_driver_verbs.options import LIMITS, VerbsOptions, endpoints_of
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.driver_options import checked
from mooncake_transfer.errors import ConfigError

PORTS = [
    Port("mlx5_0", 1, "ACTIVE", "InfiniBand", "400 Gb/sec", (), 0),
    Port("mlx5_1", 1, "DOWN", "InfiniBand", "400 Gb/sec", (), 0),
    Port("mlx5_2", 1, "ACTIVE", "Ethernet", "200 Gb/sec", ("eth2",), 1),
    Port("mlx5_2", 2, "ACTIVE", "Ethernet", "200 Gb/sec", ("eth3",), 1),
]


def chosen(devices: str) -> list[tuple[str, str, int]]:
    specs = endpoints_of(VerbsOptions(devices=devices), PORTS)
    return [(spec.device, spec.options["device"] + spec.options["port"], spec.numa_node) for spec in specs]


def test_every_active_port_is_a_rail_with_its_numa_node() -> None:
    assert chosen("") == [("mlx5_0:1", "mlx5_01", 0), ("mlx5_2:1", "mlx5_21", 1), ("mlx5_2:2", "mlx5_22", 1)]


def test_devices_and_ports_can_be_named() -> None:
    assert chosen("mlx5_2") == [("mlx5_2:1", "mlx5_21", 1), ("mlx5_2:2", "mlx5_22", 1)]
    assert chosen("mlx5_2:2, mlx5_0") == [("mlx5_2:2", "mlx5_22", 1), ("mlx5_0:1", "mlx5_01", 0)]


@pytest.mark.parametrize("devices", ["mlx5_1", "mlx5_9", "mlx5_0:2"])
def test_a_device_without_an_active_port_is_an_error_that_lists_what_is_there(devices: str) -> None:
    with pytest.raises(ConfigError, match=r"no active port.*mlx5_1:1 \(DOWN\)"):
        chosen(devices)


@pytest.mark.parametrize("devices", [",", "mlx5_0:x", ":1", "mlx5_0,,mlx5_2"])
def test_a_list_of_devices_that_makes_no_sense_is_an_error(devices: str) -> None:
    with pytest.raises(ConfigError, match="NAME:PORT"):
        VerbsOptions(devices=devices)


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_number_beyond_its_limits_is_an_error(name: str) -> None:
    least, most = LIMITS[name]
    for value in (least - 1, most + 1):
        with pytest.raises(ConfigError, match=name):
            checked("verbs", VerbsOptions, {name: int(value)})


@pytest.mark.parametrize("options", [{"mtu": 1500}, {"host": ""}, {"gids": 1}, {"qps": "two"}])
def test_other_nonsense_is_an_error(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        checked("verbs", VerbsOptions, options)


def test_more_queue_pairs_than_an_endpoint_has_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"max_connections and qps ask for 4097 \* 16 queue pairs"):
        checked("verbs", VerbsOptions, {"max_connections": 4097, "qps": 16})


def test_the_core_knows_every_option_and_its_limits() -> None:
    """Each at both ends of its range: the core, which checks again, takes them."""
    names = [name for name in LIMITS if name not in ("control_port", "gid_index")]
    for end in (0, 1):
        # Not all at once: the largest of everything takes more memory than a test should.
        for name in names:
            if end == 1 and name in ("completion_depth", "queue_depth", "send_depth"):
                continue
            options = {"qps": 1, name: int(LIMITS[name][end])}
            config = TransferConfig(drivers=("verbs_double",), driver_options={"verbs_double": options})
            with TransferEngine(config) as engine:
                assert engine.allocate(4096).nbytes == 4096
