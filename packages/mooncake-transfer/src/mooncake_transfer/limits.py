"""Limits of this machine that decide how well bytes move, with what to do where one is in the way.

Everything is read from /proc, /sys and the process's own limits; nothing is changed. Each check reads below a
root folder, so that tests can describe any machine.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

__all__ = ["OK", "UNKNOWN", "WARNING", "Limit", "machine_limits"]

OK, WARNING, UNKNOWN = "ok", "warning", "unknown"

MIN_OPEN_FILES = 4096  # a busy engine holds a few sockets and descriptors for each of hundreds of peers
MIN_SOCKET_BUFFER = 4 << 20  # what 10 Gbit/s over 3 ms keeps in flight
MIN_SHM_BYTES = 64 << 20
# Namespaces of a machine's first process have fixed numbers (linux/proc_ns.h).
FIRST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}


class Limit(msgspec.Struct, frozen=True):
    """One finding.

    Attributes:
        name: what was looked at.
        state: ``ok``, ``warning`` (something may be slower, or refused) or ``unknown`` (not readable here).
        value: what was found.
        effect: what a warning means; empty otherwise.
        remedy: what would change it; empty when nothing needs to.
    """

    name: str
    state: str
    value: str
    effect: str = ""
    remedy: str = ""


def machine_limits(root: Path = Path("/")) -> list[Limit]:
    """Look at every limit. Never raises for what cannot be read: that is then ``unknown``."""
    checks: tuple[tuple[str, Callable[[Path], Limit | Iterator[Limit]]], ...] = (
        ("locked memory", _locked_memory),
        ("open files", _open_files),
        ("huge pages", _huge_pages),
        ("transparent huge pages", _transparent_huge_pages),
        ("reverse path filter", _reverse_path_filter),
        ("ptrace scope", _ptrace_scope),
        ("/dev/shm", _dev_shm),
        ("CPU governor", _governor),
        ("socket buffers", _socket_buffers),
        ("io_uring", _io_uring),
        ("memory of the control group", _group_memory),
        ("CPUs of the control group", _group_cpus),
        ("namespaces", _namespaces),
    )
    found: list[Limit] = []
    for name, check in checks:
        try:
            result = check(root)
        except (OSError, ValueError, IndexError, KeyError) as error:
            found.append(Limit(name, UNKNOWN, f"not readable: {error}"))
        else:
            found.append(result) if isinstance(result, Limit) else found.extend(result)
    return found


def _read(root: Path, path: str) -> str:
    return (root / path).read_text().strip()


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):g} MiB"


def _locked_memory(_: Path) -> Limit:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Limit("locked memory", OK, "unlimited")
    return Limit(
        "locked memory",
        WARNING,
        _mib(soft),
        "drivers for RDMA lock the memory they register: larger regions are refused",
        "ulimit -l unlimited; for a service LimitMEMLOCK=infinity; for a container --ulimit memlock=-1",
    )


def _open_files(_: Path) -> Limit:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= MIN_OPEN_FILES:
        return Limit("open files", OK, str(soft))
    return Limit(
        "open files",
        WARNING,
        f"{soft} (may be raised to {hard})",
        "each peer takes several sockets: with many peers new connections fail",
        f"ulimit -n {min(hard, 65536) if hard >= MIN_OPEN_FILES else 65536}",
    )


def _huge_pages(root: Path) -> Limit:
    lines = dict(line.split(":", 1) for line in _read(root, "proc/meminfo").splitlines() if ":" in line)
    total, free = (int(lines[key].split()[0]) for key in ("HugePages_Total", "HugePages_Free"))
    size = lines["Hugepagesize"].strip()
    if total:
        return Limit("huge pages", OK, f"{free} of {total} free, {size} each")
    return Limit(
        "huge pages",
        OK,
        f"none reserved ({size} each)",
        "regions that ask for huge pages are refused",
        "sysctl -w vm.nr_hugepages=N, if you want them",
    )


def _transparent_huge_pages(root: Path) -> Limit:
    folder = "sys/kernel/mm/transparent_hugepage"
    chosen = {name: _chosen(_read(root, f"{folder}/{name}")) for name in ("enabled", "shmem_enabled")}
    value = f"own memory: {chosen['enabled']}, shared memory: {chosen['shmem_enabled']}"
    if chosen["shmem_enabled"] in ("always", "advise", "within_size", "force"):
        return Limit("transparent huge pages", OK, value)
    return Limit(
        "transparent huge pages",
        OK,
        value,
        "memory that the engine allocates has small pages",
        f"echo advise > /{folder}/shmem_enabled, for fewer page faults and TLB misses",
    )


def _chosen(text: str) -> str:
    return text[text.index("[") + 1 : text.index("]")]


def _reverse_path_filter(root: Path) -> Limit:
    folder = root / "proc/sys/net/ipv4/conf"
    modes = {entry.name: int(_read(entry, "rp_filter")) for entry in folder.iterdir()}
    everywhere = modes.pop("all", 0)
    cards = [name for name in modes if name not in ("default", "lo")]
    # The kernel uses the larger of the two values; 1 is strict.
    strict = sorted(name for name in cards if max(everywhere, modes[name]) == 1)
    if not strict or len(cards) < 2:
        return Limit("reverse path filter", OK, f"{len(strict)} of {len(cards)} interfaces strict")
    return Limit(
        "reverse path filter",
        WARNING,
        f"strict on {', '.join(strict)}",
        "with several interfaces in one subnet the kernel drops what arrives on the 'wrong' one",
        "; ".join(f"sysctl -w net.ipv4.conf.{name}.rp_filter=2" for name in ("all", *strict)),
    )


def _ptrace_scope(root: Path) -> Limit:
    file = root / "proc/sys/kernel/yama/ptrace_scope"
    scope = file.read_text().strip() if file.exists() else "0"
    if scope == "0":
        return Limit("ptrace scope", OK, "0: processes of one user reach each other")
    return Limit(
        "ptrace scope",
        WARNING,
        scope,
        "on one host, memory that the engine did not allocate cannot be copied directly and goes over tcp",
        "sysctl -w kernel.yama.ptrace_scope=0, or let the engine allocate the regions",
    )


def _dev_shm(root: Path) -> Limit:
    status = os.statvfs(root / "dev/shm")
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    value = f"{_mib(free)} free of {_mib(size)}"
    if size >= MIN_SHM_BYTES:
        return Limit("/dev/shm", OK, value)
    return Limit(
        "/dev/shm",
        WARNING,
        value,
        "the engine does not need it, but process groups and data loaders of torch do",
        "for a container --shm-size=1g, or --ipc=host",
    )


def _governor(root: Path) -> Limit:
    files = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    if not files:
        return Limit("CPU governor", UNKNOWN, "not shown (a virtual machine, or no frequency scaling)")
    governors = sorted({file.read_text().strip() for file in files})
    if governors == ["performance"]:
        return Limit("CPU governor", OK, "performance")
    return Limit(
        "CPU governor",
        WARNING,
        ", ".join(governors),
        "small transfers wait for the clock to speed up",
        "cpupower frequency-set -g performance",
    )


def _socket_buffers(root: Path) -> Limit:
    paths = {
        "net.core.rmem_max": "proc/sys/net/core/rmem_max",
        "net.core.wmem_max": "proc/sys/net/core/wmem_max",
        "net.ipv4.tcp_rmem": "proc/sys/net/ipv4/tcp_rmem",
        "net.ipv4.tcp_wmem": "proc/sys/net/ipv4/tcp_wmem",
    }
    texts = {name: _read(root, path).split() for name, path in paths.items() if (root / path).exists()}
    if not texts:
        return Limit("socket buffers", UNKNOWN, "not shown in this network namespace")
    # What limits a connection that tunes itself is the last of the three numbers.
    small = {
        name: text for name, text in texts.items() if len(text) == 3 and int(text[2]) < MIN_SOCKET_BUFFER
    }
    value = ", ".join(f"{name} {' '.join(text)}" for name, text in texts.items())
    if not small:
        return Limit("socket buffers", OK, value)
    return Limit(
        "socket buffers",
        WARNING,
        value,
        "one tcp connection over a long or fast link cannot fill it; more connections help",
        "; ".join(f"sysctl -w {name}='{text[0]} {text[1]} 16777216'" for name, text in small.items()),
    )


def _io_uring(root: Path) -> Limit:
    file = root / "proc/sys/kernel/io_uring_disabled"
    mode = file.read_text().strip() if file.exists() else "0"
    words = {"0": "allowed", "1": "for a group of users only", "2": "forbidden"}
    effect = "" if mode == "0" else "file drivers use plain reads and writes"
    remedy = "" if mode == "0" else "sysctl -w kernel.io_uring_disabled=0, if you trust what runs here"
    return Limit("io_uring", OK, words.get(mode, mode), effect, remedy)


def _group_memory(root: Path) -> Limit:
    name, folder = "memory of the control group", _control_group(root)
    if not (folder / "memory.max").exists():
        return Limit(name, OK, "no limit")
    limit, used = _read(folder, "memory.max"), int(_read(folder, "memory.current"))
    if limit == "max":
        return Limit(name, OK, "no limit")
    return Limit(
        name,
        OK,
        f"{_mib(used)} used of {_mib(int(limit))}",
        "regions count; beyond the limit the process is killed",
        "raise the container's memory limit, or make regions smaller",
    )


def _group_cpus(root: Path) -> Limit:
    name, folder = "CPUs of the control group", _control_group(root)
    cores = len(os.sched_getaffinity(0))
    if not (folder / "cpu.max").exists() or _read(folder, "cpu.max").startswith("max"):
        return Limit(name, OK, f"{cores}, without a quota")
    quota, period = map(int, _read(folder, "cpu.max").split())
    return Limit(
        name,
        WARNING if quota < period * min(cores, 2) else OK,
        f"{quota / period:g} of {cores}",
        "a process over its quota stands still until the next period: latencies of tens of milliseconds",
        "give the container more CPUs, or pin it to whole ones",
    )


def _control_group(root: Path) -> Path:
    """Folder of this process's control group, where there is one hierarchy; inside a container the root."""
    mounted = root / "sys/fs/cgroup"
    for line in _read(root, "proc/self/cgroup").splitlines():
        number, _, path = line.split(":", 2)
        if number == "0" and (mounted / path.strip("/")).is_dir():
            return mounted / path.strip("/")
    return mounted


def _namespaces(root: Path) -> Limit:
    own = []
    for kind, first in FIRST_NAMESPACES.items():
        link = str((root / f"proc/self/ns/{kind}").readlink())
        if int(link[link.index("[") + 1 : link.index("]")]) != first:
            own.append(kind)
    if not own:
        return Limit("namespaces", OK, "those of the host")
    return Limit(
        "namespaces",
        OK,
        f"own {' and '.join(own)} (a container)",
        "peers in other containers of this host may be reached over tcp instead of shared memory",
        "start them with --pid=host --ipc=host, or in one pod with shareProcessNamespace",
    )
