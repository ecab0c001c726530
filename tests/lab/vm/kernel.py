"""The guest's kernel: Debian's, unpacked into a folder, with an initramfs that reaches the host's root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from vm.shell import QEMU, TOOLS, LabError, run, say, stop

# Loaded by the initramfs before the real root is there; dependencies follow.
BOOT_MODULES = ["virtio_pci", "virtio_console", "9p", "9pnet_virtio", "overlay"]
UNPACKERS = {".xz": "xz", ".gz": "gzip", ".zst": "zstd"}
PROBE_S = 20


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel package."""

    package: str
    release: str
    image: Path
    modules: Path
    initramfs: Path


def installed_kernel(cache: Path) -> Kernel | None:
    """Return the kernel in ``cache``; None when there is none."""
    root = cache / "kernel"
    try:
        told = json.loads((root / "kernel.json").read_text())
    except (OSError, ValueError):
        return None
    release = told["release"]
    modules = module_base(root) / "lib/modules" / release
    return Kernel(
        told["package"], release, root / f"boot/vmlinuz-{release}", modules, cache / "initramfs.cpio"
    )


def module_base(root: Path) -> Path:
    """Where a package keeps lib/modules: newer ones below usr."""
    return root / "usr" if (root / "usr/lib/modules").is_dir() else root


def unpack_kernel(cache: Path, package: str, archive: Path) -> None:
    """Put a kernel package's files into ``cache``, in the place of the one that is there."""
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=cache))
    try:
        run(["dpkg", "-x", str(archive), str(new)])
        images = list((new / "boot").glob("vmlinuz-*"))
        if not images:
            raise LabError(f"{archive.name} has no boot/vmlinuz")
        release = images[0].name.removeprefix("vmlinuz-")
        run(["depmod", "-b", str(module_base(new)), release])
        (new / "kernel.json").write_text(json.dumps({"package": package, "release": release}))
        shutil.rmtree(cache / "kernel", ignore_errors=True)
        new.rename(cache / "kernel")
        (cache / "kernel").chmod(0o755)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def ensure_initramfs(kernel: Kernel) -> None:
    """Build the initramfs unless it is newer than what it is made of."""
    sources = (TOOLS / "guest-init", Path(__file__), kernel.image)
    newest = max(source.stat().st_mtime for source in sources)
    if not kernel.initramfs.exists() or kernel.initramfs.stat().st_mtime < newest:
        build_initramfs(kernel)


def build_initramfs(kernel: Kernel) -> None:
    """Pack busybox, the few modules that reach the 9p root, and guest-init."""
    busybox = next((path for path in map(Path, ("/bin/busybox", "/usr/bin/busybox")) if path.exists()), None)
    if busybox is None:
        raise LabError("busybox-static is missing: run --setup")
    with tempfile.TemporaryDirectory(prefix="vmlab-") as name:
        work = Path(name)
        for folder in ("bin", "mod", "proc", "sys", "dev", "lower", "rw", "new"):
            (work / folder).mkdir()
        shutil.copy(busybox, work / "bin/busybox")
        shutil.copy(TOOLS / "guest-init", work / "init")
        (work / "init").chmod(0o755)
        order = [_unpack_module(path, work / "mod") for path in _modules_in_order(kernel)]
        (work / "mod/order").write_text("".join(f"{each}\n" for each in order))
        files = run(["find", ".", "-mindepth", "1"], cwd=work)
        part = kernel.initramfs.with_suffix(".part")
        with part.open("wb") as archive:
            pack = ["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"]
            subprocess.run(pack, cwd=work, input=files.encode(), stdout=archive, check=True)
        part.rename(kernel.initramfs)


def _modules_in_order(kernel: Kernel) -> list[Path]:
    base = kernel.modules.parent.parent.parent
    order: list[Path] = []
    for name in BOOT_MODULES:
        plan = run(["modprobe", "-d", str(base), "-S", kernel.release, "-D", name], check=False)
        for line in plan.splitlines():
            if line.startswith("insmod ") and Path(line.split()[1]) not in order:
                order.append(Path(line.split()[1]))
    return order


def _unpack_module(path: Path, folder: Path) -> str:
    tool = UNPACKERS.get(path.suffix)
    name = path.name.removesuffix(path.suffix) if tool else path.name
    if tool:
        with (folder / name).open("wb") as plain:
            subprocess.run([tool, "-dc", str(path)], stdout=plain, check=True)
    else:
        shutil.copy(path, folder / name)
    return name


def probe_kvm(cache: Path, kernel: Kernel) -> str:
    """Find out whether this kernel comes up under KVM here, note it in ``cache``, return the accelerator.

    /dev/kvm may be there and still not run a kernel: nested or software-only KVM.
    """
    why = "/dev/kvm cannot be opened"
    if os.access("/dev/kvm", os.R_OK | os.W_OK):
        why = _boot_under_kvm(kernel)
    answer = "tcg" if why else "kvm"
    (cache / "accel").write_text(f"{answer}\n")
    if why:
        say(f"KVM is not used: {why}")
    return answer


def _boot_under_kvm(kernel: Kernel) -> str:
    """Boot it as far as its first program; return what is wrong, nothing when it got there."""
    with tempfile.TemporaryDirectory(prefix="vmlab-") as name:
        log, errors = Path(name, "log"), Path(name, "err")
        command = [QEMU, "-accel", "kvm", "-cpu", "host", "-M", "q35", "-m", "512", "-nodefaults"]
        command += ["-display", "none", "-no-reboot", "-serial", f"file:{log}"]
        command += ["-kernel", str(kernel.image), "-initrd", str(kernel.initramfs)]
        command += ["-append", "console=ttyS0 quiet panic=-1 vmlab.probe=1"]
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
            )
        try:
            end_s = time.monotonic() + PROBE_S
            while time.monotonic() < end_s and process.poll() is None:
                if "internal error" in errors.read_text():
                    break
                time.sleep(0.2)
        finally:
            stop(process)
        if log.exists() and "vmlab: probe ok" in log.read_text(errors="replace"):
            return ""
        told = errors.read_text(errors="replace").strip().splitlines()
        return f"a Debian kernel does not come up under it: {told[0] if told else 'no sign of life'}"
