"""Installing what the lab needs from apt, and fetching the guest's kernel."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from vm.kernel import build_initramfs, installed_kernel, probe_kvm, unpack_kernel
from vm.shell import LabError, qemu_version, run, say

# What the lab needs on any machine, then what the guest finds for each stack.
PACKAGES = {
    "base": ["busybox-static", "cpio", "gzip", "xz-utils", "kmod", "iproute2", "procps", "util-linux"],
    "rdma": [
        *("rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "perftest"),
        *("python3-pyverbs", "libibverbs-dev", "librdmacm-dev", "infiniband-diags"),
    ],
    "nvme": ["nvme-cli"],
    "cxl": ["ndctl", "daxctl", "numactl"],
    "topology": ["iputils-ping", "pciutils", "hwloc-nox", "ethtool", "numactl"],
    "fabric": ["libfabric-bin", "libfabric-dev"],
}
GROUPS_FILE = "groups"  # in the cache: what it was set up with
VOLATILE_CXL = (8, 2)  # the first QEMU that emulates CXL memory which is volatile


def set_up(cache: Path, groups: list[str], wanted_kernel: str | None) -> None:
    """Install what is missing, unpack the newest kernel, find out about KVM. Raises LabError."""
    if os.geteuid() != 0:
        raise LabError("--setup installs packages: run it as root")
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise LabError(f"{tool} is missing: --setup needs a Debian machine")
    started_s = time.monotonic()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vmlab-") as name:
        work = Path(name)
        say("apt-get update")
        _apt("update")
        _install({package for group in ("base", *groups) for package in PACKAGES[group]})
        if qemu_version() < VOLATILE_CXL:
            _install_qemu(work)
        package = wanted_kernel or _newest_kernel_package()
        have = installed_kernel(cache)
        if have is None or have.package != package:
            _fetch_kernel(cache, package, work)
    kernel = installed_kernel(cache)
    if kernel is None:
        raise LabError(f"{package} was unpacked, and there is no kernel under {cache}")
    build_initramfs(kernel)
    known = cache / GROUPS_FILE
    before = known.read_text().split() if known.exists() else []
    known.write_text(" ".join(sorted({*before, *groups})) + "\n")
    accelerator = probe_kvm(cache, kernel)
    version = ".".join(map(str, qemu_version()))
    took_s = time.monotonic() - started_s
    say(f"ready in {took_s:.0f} s: QEMU {version}, kernel {kernel.release}, accelerator {accelerator}")


def _apt(*args: str, options: tuple[str, ...] = ()) -> str:
    return run(["apt-get", *options, *args], env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def _install(wanted: set[str]) -> None:
    have = set(run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n"]).splitlines())
    missing = sorted(package for package in wanted if f"{package} installed" not in have)
    if missing:
        say("installing " + " ".join(missing))
        _apt("install", "-y", "--no-install-recommends", *missing)


def _install_qemu(work: Path) -> None:
    options = _backports_options(work)
    if options:
        suite = f"{_codename()}-backports"
        try:
            _apt("update", options=options)
            say("installing qemu-system-x86 from backports")
            install = ("install", "-y", "--no-install-recommends", "-t", suite, "qemu-system-x86")
            _apt(*install, options=options)
            return
        except LabError as error:
            say(f"no QEMU from backports ({str(error).splitlines()[0]})")
    say("installing qemu-system-x86 of this release")
    _apt("install", "-y", "--no-install-recommends", "qemu-system-x86")


def _codename() -> str:
    try:
        found = re.search(r'^VERSION_CODENAME="?(\w+)', Path("/etc/os-release").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


def _backports_options(work: Path) -> tuple[str, ...]:
    """Options that add this release's backports from the mirror in use; none where that cannot be told."""
    apt = Path("/etc/apt")
    files = [apt / "sources.list", *apt.glob("sources.list.d/*.list"), *apt.glob("sources.list.d/*.sources")]
    texts = [file.read_text() for file in files if file.is_file()]
    patterns = (r"^URIs:\s*(\S+/debian)/?\s*$", r"^deb\s+(?:\[[^\]]*\]\s+)?(\S+/debian)/?\s")
    found = [
        match[1] for text in texts for each in patterns if (match := re.search(each, text, re.MULTILINE))
    ]
    if not found or not _codename():
        return ()
    keys = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg"
    old = files[0].read_text() if files[0].is_file() else ""
    sources = work / "backports.list"
    sources.write_text(f"{old}\ndeb [{keys}] {found[0]} {_codename()}-backports main\n")
    return "-o", f"Dir::Etc::sourcelist={sources}", "-o", "APT::Get::List-Cleanup=0"


def _newest_kernel_package() -> str:
    """The concrete linux-image package behind the newest amd64 meta package."""
    listed = run(["apt-cache", "search", "--names-only", r"^linux-image-([0-9.]+-)?amd64$"]).splitlines()

    def version(name: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", name.replace("amd64", ""))] or [0]

    for meta in sorted((line.split()[0] for line in listed), key=version, reverse=True):
        found = re.search(r"Depends: (linux-image-\S+)", run(["apt-cache", "depends", meta], check=False))
        if found:
            return found[1]
    raise LabError("apt knows no linux-image-amd64 package; run apt-get update")


def _fetch_kernel(cache: Path, package: str, work: Path) -> None:
    say(f"fetching {package}")
    run(["apt-get", "-o", "APT::Sandbox::User=root", "download", package], cwd=work)
    archives = list(work.glob("linux-image-*.deb"))
    if not archives:
        raise LabError(f"apt-get download {package} left no package")
    unpack_kernel(cache, package, archives[0])
