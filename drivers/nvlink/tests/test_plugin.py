"""What the engine is told of the driver, which options it takes, and why it says that it cannot be used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cuda_double import build

from mooncake_driver_nvlink import NvlinkOptions, plugin
from mooncake_driver_nvlink.options import render
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError, TransferError
from mooncake_transfer.hooks import Available, Unavailable


def test_the_driver_takes_gpu_and_main_memory_and_goes_before_networks() -> None:
    (info,) = plugin.mooncake_transfer_drivers()
    assert (info.name, info.kinds, info.priority) == ("nvlink", frozenset({"cuda", "dram"}), 90)
    assert not info.trusted_probe  # it loads foreign code


def test_describing_the_driver_loads_neither_its_core_nor_cuda() -> None:
    code = (
        "import sys; from mooncake_driver_nvlink import plugin; plugin.mooncake_transfer_drivers();"
        "assert 'mooncake_driver_nvlink._core' not in sys.modules;"
        "assert 'libcuda' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"DEVICES": 0}, "shows no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ({"INIT_ERROR": 802}, "CUDA error 802; look at nvidia-smi, at who may open /dev/nvidia"),
        ({"VERSION": 11020}, "made for CUDA 11.2, 11.4 is needed: install 470 or newer"),
    ],
)
def test_a_probe_says_why_not_and_what_would_help(settings: dict[str, int], reason: str) -> None:
    found = plugin.find_gpus(str(build(**settings)))
    assert isinstance(found, Unavailable)
    assert reason in found.reason


def test_a_probe_without_the_library_says_so() -> None:
    found = plugin.find_gpus("libcuda-that-is-not-there.so.1")
    assert isinstance(found, Unavailable)
    assert "cannot open shared object file" in found.reason
    assert "install NVIDIA's driver" in found.reason


def test_a_probe_names_the_gpus() -> None:
    assert plugin.find_gpus(str(build(DEVICES=2))) == Available(("cuda:0 double 0", "cuda:1 double 1"))


@pytest.mark.parametrize(
    ("settings", "reason"), [({"DEVICES": 0}, "finds no device"), ({"VERSION": 11020}, "11.4 is needed")]
)
def test_the_core_says_why_it_does_not_open(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], reason: str
) -> None:
    monkeypatch.setattr(
        "mooncake_transfer.drivers._verdicts.of",
        lambda asked: dict.fromkeys([question.driver for question in asked], Available()),
    )
    options = {"nvlink": {"library": str(build(**settings))}}
    with pytest.raises(TransferError, match=reason):
        TransferEngine(TransferConfig(drivers=("nvlink",), driver_options=options))


def test_the_option_alone_says_where_the_library_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    options = {"nvlink": {"library": str(build(DEVICES=2))}}
    with TransferEngine(TransferConfig(drivers=("nvlink",), driver_options=options)) as engine:
        assert engine.drivers["nvlink"].devices == ("cuda:0 double 0", "cuda:1 double 1")
    options = {"nvlink": {"library": "/nowhere/libcuda.so.1"}}
    with pytest.raises(TransferError, match=r"cannot load /nowhere/libcuda\.so\.1"):
        TransferEngine(TransferConfig(drivers=("nvlink",), driver_options=options))


def test_every_option_is_rendered() -> None:
    options = render({"streams": 3, "allow_other_users": True, "answer_timeout_s": 0.5, "fabric": "off"})
    assert set(options) == set(NvlinkOptions.__struct_fields__)
    assert options["streams"] == "3"
    assert options["allow_other_users"] == "true"
    assert options["fabric"] == "off"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": 33}, "streams is 33; it must be within 1..32"),
        ({"fabric": "maybe"}, "Invalid enum value 'maybe'"),
        ({"color": "red"}, "known options: library, streams"),
        ({"in_flight_bytes": 1}, "in_flight_bytes is 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(options)
