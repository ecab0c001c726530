"""Metrics of an engine, as Prometheus reads them."""

import gc
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest

from mooncake_transfer import RailConfig, TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError, PeerUnreachable
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import wait_until

prometheus_client = pytest.importorskip(
    "prometheus_client", reason="prometheus-client is not installed (the extra 'metrics')"
)
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from mooncake_transfer.metrics import EngineCollector  # noqa: E402

MIB = 1 << 20
DEADLINE_S = 20.0


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return str(response.read().decode())


def test_rails_and_drivers_have_metrics_that_follow_what_moved() -> None:
    config = TransferConfig(drivers=("tcp",), metrics_port=0)
    with TransferEngine(TransferConfig(drivers=("tcp",))) as owner, TransferEngine(config) as mover:
        there, here = owner.allocate(MIB), mover.allocate(MIB)
        remote = mover.import_region(there.descriptor())
        mover.write(here, remote, [[0, 0, MIB]]).wait(10)
        mover.read(here, remote, [[0, 0, 4096]]).wait(10)
        assert mover.metrics_address is not None
        found = samples(fetch(mover.metrics_address))
        driver = {("engine", mover.address), ("driver", "tcp")}
        rail = driver | {("peer", owner.address), ("device", ""), ("remote_device", "")}
        rail = next(set(labels) for name, labels in found if name == "mooncake_transfer_rail_bytes_total")
        assert {("engine", mover.address), ("driver", "tcp"), ("peer", owner.address)} <= rail
        assert found["mooncake_transfer_rail_bytes_total", frozenset(rail)] == MIB + 4096
        assert found["mooncake_transfer_rail_in_flight_bytes", frozenset(rail)] == 0
        closed = frozenset(rail | {("state", "closed")})
        assert found["mooncake_transfer_rail_state", closed] == 1
        assert found["mooncake_transfer_rail_state", frozenset(rail | {("state", "open")})] == 0
        driver |= {("device", "")}
        assert found["mooncake_transfer_driver_bytes_written_total", frozenset(driver)] == MIB
        assert found["mooncake_transfer_driver_bytes_read_total", frozenset(driver)] == 4096
        assert found["mooncake_transfer_driver_faults_total", frozenset(driver)] == 0
        assert found["mooncake_transfer_region_bytes", frozenset({("engine", mover.address)})] == MIB
        operations = found["mooncake_transfer_rail_operations_total", frozenset(rail)]
        endless = frozenset(rail | {("le", "+Inf")})
        assert found["mooncake_transfer_rail_latency_seconds_bucket", endless] == operations


class Failing:
    """A rail whose local device is dead, as the metrics of its engine show it."""

    def __init__(self, stack: ExitStack, rails: RailConfig) -> None:
        fabric = stack.enter_context(FakeFabric())
        self.near = stack.enter_context(TransferEngine(fabric.config("near", rails=rails)))
        far = stack.enter_context(TransferEngine(fabric.config("far")))
        self.local = self.near.allocate(4096)
        self.remote = self.near.import_region(far.allocate(4096).descriptor())
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(EngineCollector(self.near))
        self.device = fabric.device("near")
        self.device.die()

    def write(self) -> None:
        self.near.write(self.local, self.remote, [[0, 0, 4096]]).wait(DEADLINE_S)

    def fail(self) -> None:
        with pytest.raises(PeerUnreachable):
            self.write()

    def rail(self) -> dict[str, float]:
        """Its counters, by name without prefix, and those of its states that are 1, by name of the state."""
        found: dict[str, float] = {}
        for (name, labels), value in samples(
            prometheus_client.generate_latest(self.registry).decode()
        ).items():
            if name == "mooncake_transfer_rail_state" and value:
                found[dict(labels)["state"]] = value
            elif name.startswith("mooncake_transfer_rail_") and name.endswith("_total"):
                found[name.removeprefix("mooncake_transfer_rail_")] = value
        return found


def test_a_rail_that_fails_shows_an_open_breaker_and_its_errors() -> None:
    with ExitStack() as stack:
        rail = Failing(stack, RailConfig(breaker_errors=1, breaker_pause_s=600, attempts=1))
        rail.fail()
        counters = {"bytes_total": 0, "operations_total": 0, "errors_total": 1, "retries_total": 0}
        assert rail.rail() == {"open": 1, **counters}


def test_a_breaker_is_half_open_after_its_pause_and_closed_after_a_success() -> None:
    with ExitStack() as stack:
        rail = Failing(stack, RailConfig(breaker_errors=1, breaker_pause_s=0.05, attempts=1))
        rail.fail()
        wait_until(lambda: "half-open" in rail.rail(), "the pause is over")
        counters = {"bytes_total": 0, "operations_total": 0, "errors_total": 1, "retries_total": 0}
        assert rail.rail() == {"half-open": 1, **counters}
        rail.device.revive()
        rail.write()
        counters |= {"bytes_total": 4096, "operations_total": 1}
        assert rail.rail() == {"closed": 1, **counters}


def test_a_rail_that_failed_less_often_than_its_breaker_takes_is_suspect_and_counts_its_retries() -> None:
    with ExitStack() as stack:
        rail = Failing(stack, RailConfig(breaker_errors=100, suspect_pause_s=600, attempts=3))
        rail.fail()
        assert rail.rail() == {
            "suspect": 1,
            "bytes_total": 0,
            "operations_total": 0,
            "errors_total": 3,
            "retries_total": 2,
        }


def test_each_device_of_a_driver_has_metrics_of_its_own() -> None:
    options = {"tcp": {"hosts": "127.0.0.1,127.0.0.2"}}
    with TransferEngine(TransferConfig(drivers=("tcp",), driver_options=options, metrics_port=0)) as engine:
        assert engine.metrics_address is not None
        found = samples(fetch(engine.metrics_address))
    labels = [dict(each) for name, each in found if name == "mooncake_transfer_driver_connections"]
    assert {each["driver"] for each in labels} == {"tcp"}
    assert {each["device"] for each in labels} == {"127.0.0.1", "127.0.0.2"}


def test_the_metrics_port_is_free_again_when_the_engine_is_closed() -> None:
    engine = TransferEngine(TransferConfig(drivers=("tcp",), metrics_port=0))
    address = engine.metrics_address
    assert address is not None
    assert "mooncake_transfer_engine_info" in fetch(address)
    engine.close()
    with pytest.raises(urllib.error.URLError):
        fetch(address)
    port = int(address.rsplit(":", 1)[1])
    with TransferEngine(TransferConfig(drivers=("tcp",), metrics_port=port)) as second:
        assert second.metrics_address == address


def test_a_metrics_port_that_is_taken_is_a_config_error() -> None:
    with TransferEngine(TransferConfig(drivers=("tcp",), metrics_port=0)) as first:
        assert first.metrics_address is not None
        port = int(first.metrics_address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"cannot serve metrics on .*{port}"):
            TransferEngine(TransferConfig(drivers=("tcp",), metrics_port=port))


def test_without_a_metrics_port_nothing_listens() -> None:
    with TransferEngine(TransferConfig(drivers=("tcp",))) as engine:
        assert engine.metrics_address is None


def test_a_collector_in_a_registry_of_ones_own_ends_with_its_engine() -> None:
    registry = prometheus_client.CollectorRegistry()
    engine = TransferEngine(TransferConfig(drivers=("tcp",)))
    registry.register(EngineCollector(engine))
    assert b"mooncake_transfer_regions" in prometheus_client.generate_latest(registry)
    engine.close()
    del engine
    gc.collect()
    assert prometheus_client.generate_latest(registry) == b""


def test_without_prometheus_client_a_metrics_port_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mooncake_transfer.metrics", None)
    with pytest.raises(ConfigError, match=r"pip install mooncake-transfer\[metrics\]"):
        TransferEngine(TransferConfig(drivers=("tcp",), metrics_port=0))


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_a_config_error(port: int) -> None:
    with pytest.raises(ConfigError, match="metrics_port"):
        TransferConfig(metrics_port=port)
