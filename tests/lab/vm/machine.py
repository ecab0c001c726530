"""The QEMU command line for a guest: nodes, buses, NICs, drives, CXL memory."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from vm.kernel import Kernel
from vm.shell import QEMU, qemu_version

# Latency in ns and bandwidth of memory by the firmware's tables.
NEAR, FAR = (80, "20G"), (400, "4G")
OTHER_NODE_NS = 60
BOUNCE_BYTES = 64 << 20


def accelerator(cache: Path, choice: str, cxl: bool) -> tuple[str, list[str]]:
    """Return the accelerator's name and its options; ``auto`` takes what --setup found to work."""
    if choice == "auto":
        try:
            choice = (cache / "accel").read_text().strip()
        except OSError:
            choice = "tcg"
    # The kernel does not commit a CXL region where it sees a hypervisor: it cannot trust WBINVD there.
    bare = ",hypervisor=off" if cxl else ""
    if choice == "kvm":
        return "kvm", ["-accel", "kvm", "-cpu", "host" + bare]
    # Five-level page tables and PCIDs only cost time under emulation.
    return "tcg", ["-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max,la57=off,pcid=off" + bare]


class Machine:
    """Collects the options of one guest."""

    def __init__(self, flags: argparse.Namespace, rank: int, work: Path, kernel: Kernel):
        self.flags, self.rank, self.work, self.kernel = flags, rank, work, kernel
        self.type = ["q35"]
        self.devices: list[str] = []
        self.virtio = ""
        self.memory_mib = flags.mem
        self.ports: dict[int, str] = {}
        self.slot = 10

    def command(self) -> tuple[str, list[str]]:
        """Return the accelerator's name and the whole command line."""
        flags = self.flags
        name, accel = accelerator(flags.kernel_cache, flags.accel, bool(flags.cxl))
        numa = self._nodes()
        self._buses()
        self._nics()
        self._drives()
        self._cxl()
        fixed = self._fixed(max(flags.cpus, flags.numa), numa)
        devices = [
            each + self.virtio if self.virtio and re.match(r"virtio-\w+-pci", each) else each
            for each in (*fixed, *self.devices)
        ]
        return name, [QEMU, *accel, "-M", ",".join(self.type), *devices]

    def _nodes(self) -> list[str]:
        """NUMA nodes with CPUs and memory, and one more without CPUs for --far-mem."""
        flags, count = self.flags, self.flags.numa
        # With no -numa there is no SRAT, and then the kernel makes no node for CXL memory.
        if count == 1 and not flags.far_mem and not flags.cxl:
            return []
        cpus, share = max(flags.cpus, count), flags.mem // count
        options = []
        for node in range(count):
            first, last = node * cpus // count, (node + 1) * cpus // count - 1
            options += ["-object", f"memory-backend-ram,id=ram{node},size={share}M"]
            options += ["-numa", f"node,nodeid={node},cpus={first}-{last},memdev=ram{node}"]
        self.memory_mib = share * count
        if flags.far_mem:
            self.type.append("hmat=on")
            self.memory_mib += flags.far_mem
            options += ["-object", f"memory-backend-ram,id=ramfar,size={flags.far_mem}M"]
            options += ["-numa", f"node,nodeid={count},memdev=ramfar,initiator=0"]
            options += self._speeds()
        total = count + bool(flags.far_mem)
        for source in range(total):
            for target in range(source + 1, total):
                far = flags.far_mem and target == count
                value = 30 if far else 20 + target - source
                options += ["-numa", f"dist,src={source},dst={target},val={value}"]
        return options

    def _speeds(self) -> list[str]:
        count, options = self.flags.numa, []
        for target in range(count + 1):
            latency, bandwidth = FAR if target == count else NEAR
            for initiator in range(count):
                more = OTHER_NODE_NS if target not in (initiator, count) else 0
                entry = f"hmat-lb,initiator={initiator},target={target},hierarchy=memory,data-type=access-"
                options += ["-numa", f"{entry}latency,latency={latency + more}"]
                options += ["-numa", f"{entry}bandwidth,bandwidth={bandwidth}"]
        return options

    def _buses(self) -> None:
        """A PCI root on each of several nodes."""
        if self.flags.numa == 1:
            return
        for node in range(self.flags.numa):
            place = f"bus_nr={0x20 * (node + 1)},numa_node={node},bus=pcie.0"
            self.devices += ["-device", f"pxb-pcie,id=pxb{node},{place}"]
            self.ports[node] = f"pxb{node}"

    def _port(self, index: int) -> str:
        """A root port for device number ``index``, round the nodes."""
        self.slot += 1
        parent = self.ports[index % self.flags.numa] if self.ports else "pcie.0"
        name = f"rp{self.slot}"
        place = f"bus={parent},chassis={self.slot},slot={self.slot}"
        self.devices += ["-device", f"pcie-root-port,id={name},{place}"]
        return name

    def _nics(self) -> None:
        if self.flags.hosts > 1:
            if self.rank == 0:
                role = "server=on"
            else:
                role = "server=off," + ("reconnect-ms=200" if qemu_version() >= (9, 2) else "reconnect=1")
            wire = f"stream,id=wire,addr.type=unix,addr.path={self.flags.lab / 'wire'},{role}"
            mac = f"52:54:00:4d:00:{self.rank:02x}"
            self._nic(wire, "wire", mac, 0)
        for index in range(self.flags.nics):
            hub = f"hubport,id=hub{index},hubid=7"
            self._nic(hub, f"hub{index}", f"52:54:00:4c:00:{index:02x}", index)

    def _nic(self, netdev: str, name: str, mac: str, index: int) -> None:
        bus = self._port(index)
        device = f"virtio-net-pci,netdev={name},mac={mac},bus={bus},romfile="
        self.devices += ["-netdev", netdev, "-device", device]

    def _drives(self) -> None:
        for index in range(self.flags.nvme):
            path = self.work / f"ssd{index}.img"
            with path.open("wb") as file:
                file.truncate(256 << 20)
            bus = self._port(index)
            drive = f"if=none,id=ssd{index},format=raw,cache=unsafe,file={path}"
            device = f"nvme,drive=ssd{index},serial=vmlab{index},bus={bus}"
            self.devices += ["-drive", drive, "-device", device]

    def _cxl(self) -> None:
        flags = self.flags
        if not flags.cxl:
            return
        kinds = ["ram", "pmem"] if flags.cxl == "both" else [flags.cxl]
        window = max(4096, 2 * flags.cxl_size * len(kinds))
        self.type += ["cxl=on", "cxl-fmw.0.targets.0=cxl0", f"cxl-fmw.0.size={window}M"]
        self.devices += ["-device", "pxb-cxl,id=cxl0,bus_nr=224,bus=pcie.0"]
        for at, kind in enumerate(kinds):
            backend = f"memory-backend-ram,id=cxlmem{at},size={flags.cxl_size}M,share=on"
            port = f"cxl-rp,id=cxlrp{at},port={at},bus=cxl0,chassis={200 + at},slot={2 + at}"
            self.devices += ["-device", port, "-object", backend]
            memory = f"volatile-memdev=cxlmem{at}"
            if kind == "pmem":
                self.devices += ["-object", f"memory-backend-ram,id=cxllsa{at},size=1M,share=on"]
                memory = f"persistent-memdev=cxlmem{at},lsa=cxllsa{at}"
            self.devices += ["-device", f"cxl-type3,bus=cxlrp{at},{memory},id=t3-{at},sn={at + 1}"]
        if flags.cxl_mode == "system-ram" and qemu_version() >= (9, 1):
            # CXL memory is emulated access by access: a device that reads or writes it goes through bounce
            # buffers, 4 KiB unless told. That bound holds for the device's own view of memory, which a virtio
            # device uses only with iommu_platform.
            self.devices += ["-global", f"pci-device.x-max-bounce-buffer-size={BOUNCE_BYTES}"]
            self.virtio = ",disable-legacy=on,iommu_platform=on"

    def _fixed(self, cpus: int, numa: list[str]) -> list[str]:
        """What every guest has: kernel, console, the host's root and the channels to this program."""
        flags, work = self.flags, self.work
        arguments = (
            "console=ttyS0 quiet panic=-1 oops=panic mitigations=off nokaslr nowatchdog audit=0 selinux=0 "
            "apparmor=0 random.trust_cpu=on net.ifnames=0 cgroup_disable=pressure "
            "transparent_hugepage=madvise "
        )
        options = ["-smp", str(cpus), "-m", f"{self.memory_mib}M", *numa, "-name", f"vmlab{self.rank}"]
        options += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-rtc", "base=utc"]
        options += ["-kernel", str(self.kernel.image), "-initrd", str(self.kernel.initramfs)]
        options += ["-append", arguments + " ".join(flags.append)]
        options += ["-serial", f"file:{work / 'console.log'}", "-device", "virtio-rng-pci"]
        options += self._share("root", "hostroot", Path("/"), ",readonly=on")
        options += self._share("ctl", "control", work)
        options += self._share("lab", "lab", flags.lab)
        options += ["-device", "virtio-serial-pci"]
        for stream in ("out", "err"):
            options += ["-chardev", f"socket,id={stream},path={work / stream}.sock"]
            options += ["-device", f"virtserialport,chardev={stream},name=vmlab.{stream}"]
        if flags.out:
            options += self._share("outdir", "outdir", flags.out)
        return options

    @staticmethod
    def _share(name: str, tag: str, folder: Path, more: str = "") -> list[str]:
        place = f"local,id={name},path={folder},security_model=none,multidevs=remap{more}"
        return ["-fsdev", place, "-device", f"virtio-9p-pci,fsdev={name},mount_tag={tag}"]
