"""What the engine is told of the driver, its options, its shim, and why it says that it cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cann import build, shim_of

from mooncake_driver_ascend import AscendOptions, plugin
from mooncake_driver_ascend.options import endpoints, render
from mooncake_driver_ascend.shim_build import ShimError, build_shim, main
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.config import load_config
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import Available, Unavailable


def test_describing_the_driver_loads_neither_its_core_nor_cann() -> None:
    code = (
        "import sys; from mooncake_driver_ascend import plugin; plugin.mooncake_transfer_drivers();"
        "assert 'mooncake_driver_ascend._core' not in sys.modules;"
        "assert 'libascendcl' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_probe_says_what_is_missing(tmp_path: Path) -> None:
    found = plugin.find_npus("libascendcl-that-is-not-there.so", tmp_path / "shim.so")
    assert isinstance(found, Unavailable)
    assert "source its set_env.sh" in found.reason
    library = str(build() / "lib64" / "libascendcl.so")
    found = plugin.find_npus(library, tmp_path / "shim.so")
    assert isinstance(found, Unavailable)
    assert "run `mooncake-ascend build-shim` once" in found.reason
    assert plugin.find_npus(library, shim_of(build() / "home")) == Available(("npu:0", "npu:1"))


def test_the_shim_is_built_by_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "deep" / "shim.so"
    assert main(["build-shim", "--cann", str(build()), "--into", str(made)]) == 0
    assert capsys.readouterr().out.strip() == str(made)
    assert made.is_file()


def test_a_shim_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    with pytest.raises(ShimError, match=r"has neither hixl/hixl\.h nor adxl/adxl_engine\.h"):
        build_shim(tmp_path, tmp_path / "shim.so")
    header = tmp_path / "include" / "hixl" / "hixl.h"
    header.parent.mkdir(parents=True)
    header.write_text("#error not for this compiler\n")
    with pytest.raises(ShimError, match=r"none of libcann_hixl\.so"):
        build_shim(tmp_path, tmp_path / "shim.so")
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libhixl.so").touch()
    with pytest.raises(ShimError, match="not for this compiler"):
        build_shim(tmp_path, tmp_path / "shim.so")
    with pytest.raises(ShimError, match=r"install a C\+\+17 compiler"):
        build_shim(tmp_path, tmp_path / "shim.so", compiler="no-such-compiler")


def test_options_alone_say_where_the_runtime_and_the_shim_are_and_which_npus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where build-shim never put anything
    shim = tmp_path / "elsewhere" / "shim.so"
    build_shim(build(), shim, compiler=os.environ.get("CXX", "c++").split()[0])
    options = {"library": str(build() / "lib64" / "libascendcl.so"), "shim": str(shim), "devices": "0,1"}
    config = TransferConfig(drivers=("ascend",), driver_options={"ascend": options})
    with TransferEngine(config) as engine:
        assert engine.drivers["ascend"].devices == ("npu:0", "npu:1")
        assert len(engine.stats()) == 2, "each NPU has an endpoint"


def test_each_npu_gets_an_endpoint() -> None:
    specs = endpoints({"devices": "0, 3", "shim": "/a/shim.so"})
    assert [spec.device for spec in specs] == ["npu:0", "npu:3"]
    assert [spec.options["device"] for spec in specs] == ["0", "3"]
    assert set(render({})) == {*AscendOptions.__struct_fields__, "device"} - {"devices"}


@pytest.mark.parametrize(("text", "devices"), [("1", ["npu:1"]), ("0,1", ["npu:0", "npu:1"])])
def test_the_environment_names_one_npu_or_several(text: str, devices: list[str]) -> None:
    loaded = load_config(environment={"MOONCAKE_TRANSFER_DRIVER_OPTIONS__ASCEND__DEVICES": text})
    specs = endpoints(loaded.config.driver_options["ascend"])
    assert [spec.device for spec in specs] == devices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ""}, "name one or more NPUs"),
        ({"devices": "0,-1"}, "devices is '0,-1'; name one or more NPUs"),
        ({"devices": -1}, "devices is '-1'; name one or more NPUs"),
        ({"devices": "1,01"}, "names an NPU twice"),
        ({"buffer_pool": "much"}, "must be like '4:8'"),
        ({"rdma_traffic_class": 33}, "a multiple of 4"),
        ({"rdma_service_level": 8}, "rdma_service_level is 8; it must be within 0..7"),
        ({"color": "red"}, "known options: library, shim"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        endpoints(options)
