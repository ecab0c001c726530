"""The topology of recorded machines: what is found, how far apart it is, what an override changes."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mooncake_transfer.cli import build_app
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.testing.machine import SysfsMachine
from mooncake_transfer.topology import DeviceKind, Distance, Override, Topology
from mooncake_transfer.topology.addresses import interface_addresses
from mooncake_transfer.topology.nvml import GpuInfo, ask_nvml
from mooncake_transfer.topology.sysfs import Tree

NVIDIA = {"vendor": "0x10de", "base": "0x030200"}


@pytest.fixture
def machine(tmp_path: Path) -> SysfsMachine:
    return SysfsMachine(tmp_path)


@pytest.fixture
def server(machine: SysfsMachine) -> Topology:
    """Two sockets, each with a GPU and a NIC on one switch, a NIC and a drive elsewhere; far memory."""
    machine.node(0, "0-15", 256 << 10, "10 21 31", read_latency=80, read_bandwidth=200_000)
    machine.node(1, "16-31", 256 << 10, "21 10 41")
    machine.node(2, "", 512 << 10, "31 41 10", read_latency=400, read_bandwidth=30_000)
    machine.write("sys/devices/virtual/memory_tiering/memory_tier4/nodelist", "0-1")
    machine.write("sys/devices/virtual/memory_tiering/memory_tier112/nodelist", "2")
    for node, bus in ((0, "2"), (1, "8")):
        root, port, up = f"pci0000:{bus}0", f"0000:{bus}0:01.0", f"0000:{bus}1:00.0"
        for bridge in ((root, port), (root, port, up), (root, port, up, f"0000:{bus}2:00.0")):
            machine.pci(*bridge, node=node, vendor="0x1000", base="0x060400")
        gpu = machine.pci(root, port, up, f"0000:{bus}2:00.0", f"0000:{bus}3:00.0", node=node, **NVIDIA)
        machine.write(f"proc/driver/nvidia/gpus/{gpu.name}/information", "Model: \t\t Example H200")
        (gpu / "driver").mkdir()
        near = machine.pci(root, port, up, f"0000:{bus}2:01.0", f"0000:{bus}4:00.0", node=node)
        machine.nic(f"near{node}", near, speed=400_000)
        machine.rdma(f"mlx5_{node}", near, rate="400 Gb/sec (4X NDR)")
        machine.nic(f"side{node}", machine.pci(f"pci0000:{bus}8", f"0000:{bus}8:00.0", node=node))
        machine.nvme(f"nvme{node}", machine.pci(root, f"0000:{bus}0:02.0", f"0000:{bus}9:00.0", node=node))
    machine.nic("veth0", None, speed=10_000)
    machine.rdma("rxe0", None, parent="side1")
    return Topology.discover(
        machine.root, addresses={"near0": ["10.0.0.1", "fd00::1"], "side1": ["10.0.1.2"]}
    )


def test_nodes_come_with_cpus_memory_speed_and_tier(server: Topology) -> None:
    near, _, far = server.nodes
    assert near.cpus == tuple(range(16))
    assert (near.memory_bytes, near.tier, near.is_far) == (256 << 30, 4, False)
    assert (far.cpus, far.memory_bytes, far.tier, far.is_far) == ((), 512 << 30, 112, True)
    assert (far.read_latency_ns, far.read_bandwidth_bytes_per_s) == (400, 30_000 << 20)
    assert server.numa_distances() == [[10, 21, 31], [21, 10, 41], [31, 41, 10]]


def test_devices_come_with_place_speed_and_addresses(server: Topology) -> None:
    nic = server.device("near0")
    assert (nic.kind, nic.pci, nic.numa_node, nic.state) == (DeviceKind.NIC, "0000:24:00.0", 0, "up")
    assert nic.path == ("pci0000:20", "0000:20:01.0", "0000:21:00.0", "0000:22:01.0", "0000:24:00.0")
    assert (nic.bandwidth_bytes_per_s, nic.addresses) == (50_000_000_000, ("10.0.0.1", "fd00::1"))
    assert server.device("nvme1").memory_bytes == 1000 << 30
    assert [gpu.name for gpu in server.of_kind(DeviceKind.GPU)] == ["gpu0", "gpu1"]
    assert (server.device("gpu1").model, server.device("gpu1").state) == ("Example H200", "live")
    assert server.device("mlx5_0").netdevs == ("near0",)
    assert server.device("mlx5_0").bandwidth_bytes_per_s == 50_000_000_000
    assert server.device("rxe0").addresses == ("10.0.1.2",)
    assert server.device("rxe0").numa_node == 1
    assert server.notes == ()


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ("near0", "mlx5_0", Distance.SAME_DEVICE),
        ("rxe0", "side1", Distance.SAME_DEVICE),
        ("near0", "gpu0", Distance.SAME_SWITCH),
        ("near0", "nvme0", Distance.SAME_ROOT),
        ("near0", "side0", Distance.SAME_NODE),
        ("near0", "gpu1", Distance.OTHER_NODE),
        ("near0", "veth0", Distance.UNKNOWN),
        ("near0", 0, Distance.SAME_NODE),
        (1, "near0", Distance.OTHER_NODE),
    ],
)
def test_distance_is_what_lies_between(server: Topology, one: Any, other: Any, distance: Distance) -> None:
    assert server.distance(one, other) is distance
    assert server.distance(other, one) is distance


def test_functions_of_one_card_are_one_device(machine: SysfsMachine) -> None:
    for function in (0, 1):
        machine.nic(f"port{function}", machine.pci("pci0000:00", "0000:00:01.0", f"0000:01:00.{function}"))
    topology = Topology.discover(machine.root)
    assert topology.distance("port0", "port1") is Distance.SAME_DEVICE


def test_nics_are_ranked_by_distance_then_speed(server: Topology) -> None:
    assert [nic.name for nic in server.rank("gpu0")] == ["near0", "side0", "near1", "side1", "veth0"]
    assert [nic.name for nic in server.rank(1)][:3] == ["near1", "side1", "near0"]
    assert [nic.name for nic in server.rank(2, ["side1", "near1", "side0"])] == ["side0", "near1", "side1"]
    with pytest.raises(ConfigError, match=r"no device 'eth7'; known: near0, near1"):
        server.rank("eth7")


def test_what_is_down_is_ranked_last(machine: SysfsMachine) -> None:
    machine.nic("eth0", machine.pci("pci0000:00", "0000:00:01.0"), state="down")
    machine.nic("eth1", machine.pci("pci0000:00", "0000:00:02.0"), speed=-1)
    assert [nic.name for nic in Topology.discover(machine.root).rank(0)] == ["eth1", "eth0"]


def test_a_machine_without_numa_is_one_node_that_holds_everything(machine: SysfsMachine) -> None:
    machine.write("sys/devices/system/cpu/online", "0-3")
    machine.write("proc/meminfo", "MemTotal:        8388608 kB\nMemFree: 1 kB")
    machine.nic("eth0", machine.pci("pci0000:00", "0000:00:03.0", node=-1))
    machine.nic("lo", None)
    machine.write("sys/class/net/lo/type", 772)
    machine.write("sys/class/net/bonding_masters", "")
    topology = Topology.discover(machine.root)
    assert [(node.cpus, node.memory_bytes) for node in topology.nodes] == [((0, 1, 2, 3), 8 << 30)]
    assert [device.name for device in topology.devices] == ["eth0"]
    assert topology.distance("eth0", 0) is Distance.SAME_NODE
    assert topology.numa_distances() == [[10]]


def test_a_device_that_does_not_say_its_node_takes_that_of_its_bridge(machine: SysfsMachine) -> None:
    machine.node(0, "0", 1024, "10 20")
    machine.node(1, "1", 1024, "20 10")
    machine.pci("pci0000:80", "0000:80:01.0", node=1, base="0x060400")
    machine.nic("eth0", machine.pci("pci0000:80", "0000:80:01.0", "0000:81:00.0", node=-1))
    machine.nic("eth1", machine.pci("pci0000:00", "0000:00:01.0", node=-1))
    topology = Topology.discover(machine.root)
    assert topology.device("eth0").numa_node == 1
    assert topology.device("eth1").numa_node == -1
    assert topology.distance("eth1", 0) is Distance.UNKNOWN
    assert "node unknown" in topology.render_text()
    assert "node unknown" in topology.render_svg()


def test_missing_and_broken_files_are_no_error(machine: SysfsMachine) -> None:
    assert Topology.discover(machine.root).nodes[0].index == 0
    machine.node(0, "0-1,x", 1024, "nonsense")
    machine.node(3, "8", 1024, "10 20 30")
    machine.nic("eth0", machine.pci("pci0000:00", "0000:00:03.0"), speed="")
    machine.write("sys/class/nvme/nvme9", "not a folder")
    machine.link("sys/class/net/loop", machine.root / "sys/class/net/loop")
    topology = Topology.discover(machine.root)
    assert [node.distances for node in topology.nodes] == [(10, 20), (20, 10)]
    assert topology.device("eth0").bandwidth_bytes_per_s == 0
    assert topology.numa_distances()[0] == [10, 255, 255, 20]
    assert topology.numa_distances()[1] == [255, 10, 255, 255]


def test_what_is_forbidden_is_noted(machine: SysfsMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.nic("eth0", machine.pci("pci0000:00", "0000:00:03.0"))
    read_text = Path.read_text

    def refuse(path: Path, *args: Any, **options: Any) -> str:
        if path.name == "speed":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    topology = Topology.discover(machine.root)
    assert topology.device("eth0").bandwidth_bytes_per_s == 0
    assert topology.notes == (f"cannot read {machine.root}/sys/class/net/eth0/speed: Permission denied",)
    assert "note: cannot read" in topology.render_text()


def test_a_folder_that_is_forbidden_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    tree = Tree(tmp_path)
    assert tree.names("closed") == []
    assert "Permission denied" in tree.notes[0]


def test_only_display_controllers_that_compute_are_gpus(machine: SysfsMachine) -> None:
    machine.pci("pci0000:00", "0000:00:02.0", vendor="0x1a03", base="0x030000")
    machine.pci("pci0000:00", "0000:00:04.0", vendor="0x1002", base="0x030000")
    machine.pci("pci0000:00", "0000:00:05.0", vendor="0x19e5", base="0x120000")
    gpus = {"0000:00:04.0": GpuInfo("Example", 1 << 36)}
    found = Topology.discover(machine.root, gpus=gpus).of_kind(DeviceKind.GPU)
    assert [(gpu.name, gpu.pci, gpu.memory_bytes) for gpu in found] == [
        ("gpu0", "0000:00:04.0", 1 << 36),
        ("gpu1", "0000:00:05.0", 0),
    ]
    assert found[0].state == "without driver"


def test_an_override_hides_pins_and_sets_distances(server: Topology, tmp_path: Path) -> None:
    file = tmp_path / "override.json"
    rows = [[10, 50, 60], [50, 10, 70], [60, 70, 10]]
    content = {
        "hide": ["side1", "absent"],
        "nodes": {"veth0": 1},
        "numa_distances": rows,
        "distances": [
            {"between": ["gpu1", "veth0"], "distance": "same-switch"},
            {"between": ["node:2", "near1"], "distance": "same-node"},
        ],
    }
    file.write_text(json.dumps(content))
    topology = server.corrected_by(Override.load(file))
    assert "side1" not in [device.name for device in topology.devices]
    assert topology.device("veth0").numa_node == 1
    assert topology.numa_distances() == rows
    assert topology.distance("veth0", "gpu1") is Distance.SAME_SWITCH
    assert topology.rank(2)[0].name == "near1"
    assert topology.notes == ("the override names 'absent', which is not here",)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.json", '{"hidden": []}', "hidden"),
        ("a.toml", "hide = 3", "hide"),
        ("a.toml", "hide = [", "wrong"),
        ("a.json", '{"numa_distances": [[10, 20]]}', "one row"),
        ("a.json", '{"distances": [{"between": ["a", "b"], "distance": "near"}]}', "same-switch"),
        ("a.json", '{"numa_distances": [[10]]}', "1 rows, this machine 3 nodes"),
    ],
)
def test_a_wrong_override_is_refused(
    server: Topology, tmp_path: Path, name: str, content: str, fault: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=fault):
        server.corrected_by(Override.load(tmp_path / name))


def test_a_missing_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml"):
        Override.load(tmp_path / "absent.toml")


def test_the_text_shows_every_device_at_its_place(server: Topology) -> None:
    text = server.render_text()
    assert text.startswith("3 NUMA nodes, 5 NICs, 3 RDMA devices, 2 drives, 2 GPUs\n")
    node0, node1 = text.split("\nnode 1: ")
    assert "node 0: CPUs 0-15, 256 GiB, 80 ns, 210 GB/s, tier 4" in node0
    assert all(name in node0 for name in ("near0", "mlx5_0", "gpu0", "nvme0", "10.0.0.1", "400 Gb/s"))
    assert "near1" in node1
    assert "near1" not in node0
    table = text.split("what NICs and devices share")[1].split("\n")
    assert table[1].split() == ["gpu0", "gpu1", "nvme0", "nvme1"]
    assert table[2].split() == ["near0", "switch", "far", "root", "far"]
    assert all(line == line.rstrip() for line in text.split("\n"))


def test_the_json_has_it_all(server: Topology) -> None:
    content = json.loads(server.to_json())
    assert content["numa_distances"] == server.numa_distances()
    assert content["nodes"][2]["tier"] == 112
    assert content["distances"]["near0"]["gpu0"] == "same switch"
    assert content["distances"]["near0"]["node:1"] == "other node"
    assert {device["name"] for device in content["devices"]} == {each.name for each in server.devices}


def test_the_drawing_is_a_document_with_every_name_inside_its_borders(server: Topology) -> None:
    document = ET.fromstring(server.render_svg())
    width, height = float(document.attrib["width"]), float(document.attrib["height"])
    texts = [element.text or "" for element in document.iter("{http://www.w3.org/2000/svg}text")]
    for device in server.devices:
        assert device.name in texts
    for box in document.iter("{http://www.w3.org/2000/svg}rect"):
        if box.attrib["width"] != "100%":
            assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
            assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_names_that_look_like_markup_do_not_break_the_drawing(machine: SysfsMachine) -> None:
    machine.nic("a<b>&c", machine.pci("pci0000:00", "0000:00:03.0"))
    texts = [element.text for element in ET.fromstring(Topology.discover(machine.root).render_svg()).iter()]
    assert "a<b>&c" in texts


def test_this_machine_is_described_with_its_addresses() -> None:
    topology = Topology.discover()
    assert topology.nodes[0].memory_bytes > 0
    assert len(topology.numa_distances()) > max(node.index for node in topology.nodes)
    assert "127.0.0.1" in interface_addresses().get("lo", ["127.0.0.1"])
    assert ask_nvml("libc.so.6") == {}
    assert ask_nvml("libnowhere.so.1") == {}


def test_the_command_prints_text_json_and_drawing(tmp_path: Path) -> None:
    run = CliRunner().invoke
    app = build_app()
    plain = run(app, ["topology"])
    assert plain.exit_code == 0
    assert "NUMA node" in plain.output
    drawing = tmp_path / "machine.svg"
    both = run(app, ["topology", "--json", "--svg", str(drawing)])
    assert json.loads(both.output)["nodes"]
    assert ET.fromstring(drawing.read_text()).tag.endswith("svg")
    nowhere = run(app, ["topology", "--svg", "/nowhere/machine.svg"])
    assert nowhere.exit_code == 2
    assert nowhere.output == (
        "mooncake topology: cannot write the drawing to /nowhere/machine.svg: No such file or directory; "
        "name a file in a folder that you may write to\n"
    )
    override = tmp_path / "hide.toml"
    override.write_text("hide = [3]")
    wrong = run(app, ["topology", "--override", str(override)])
    assert wrong.exit_code == 2
    assert "hide.toml" in wrong.output
