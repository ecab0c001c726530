"""What the limits of a machine say, for machines that are described as files."""

import resource
from pathlib import Path

import pytest

from mooncake_transfer.limits import OK, UNKNOWN, WARNING, Limit, machine_limits

GOOD = {
    "proc/meminfo": "MemTotal: 1 kB\nHugePages_Total: 8\nHugePages_Free: 3\nHugepagesize: 2048 kB\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
    "proc/sys/net/ipv4/conf/all/rp_filter": "0",
    "proc/sys/net/ipv4/conf/default/rp_filter": "1",
    "proc/sys/net/ipv4/conf/lo/rp_filter": "1",
    "proc/sys/net/ipv4/conf/eth0/rp_filter": "2",
    "proc/sys/net/ipv4/conf/eth1/rp_filter": "0",
    "proc/sys/kernel/yama/ptrace_scope": "0",
    "dev/shm/there": "",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "proc/sys/net/ipv4/tcp_rmem": "4096 131072 33554432",
    "proc/sys/net/ipv4/tcp_wmem": "4096 16384 4194304",
    "proc/sys/kernel/io_uring_disabled": "0",
    "proc/self/cgroup": "0::/\n",
}
NAMESPACES = {"pid": "pid:[4026531836]", "ipc": "ipc:[4026531839]"}


def machine(root: Path, files: dict[str, str], namespaces: dict[str, str] = NAMESPACES) -> dict[str, Limit]:
    for name, text in {**GOOD, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "proc/self/ns").mkdir()
    for kind, target in namespaces.items():
        (root / "proc/self/ns" / kind).symlink_to(target)
    return {limit.name: limit for limit in machine_limits(root)}


def test_a_good_machine_has_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr("mooncake_transfer.limits.MIN_OPEN_FILES", resource.RLIM_INFINITY)
    limits = machine(tmp_path, {})
    assert {limit.state for limit in limits.values()} == {OK}, limits
    assert limits["huge pages"].value == "3 of 8 free, 2048 kB each"
    assert limits["namespaces"].value == "those of the host"


@pytest.mark.parametrize(
    ("name", "files", "remedy"),
    [
        (
            "reverse path filter",
            {"proc/sys/net/ipv4/conf/eth1/rp_filter": "1"},
            "sysctl -w net.ipv4.conf.eth1.rp_filter=2",
        ),
        ("ptrace scope", {"proc/sys/kernel/yama/ptrace_scope": "1"}, "kernel.yama.ptrace_scope=0"),
        (
            "CPU governor",
            {"sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave"},
            "cpupower frequency-set -g performance",
        ),
        (
            "socket buffers",
            {"proc/sys/net/ipv4/tcp_wmem": "4096 16384 65536"},
            "sysctl -w net.ipv4.tcp_wmem='4096 16384 16777216'",
        ),
        (
            "CPUs of the control group",
            {"sys/fs/cgroup/cpu.max": "50000 100000"},
            "give the container more CPUs",
        ),
    ],
)
def test_a_bad_limit_is_a_warning_with_its_remedy(
    tmp_path: Path, name: str, files: dict[str, str], remedy: str
) -> None:
    found = machine(tmp_path, files)[name]
    assert found.state == WARNING
    assert found.effect
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("name", "which", "remedy"),
    [("locked memory", "RLIMIT_MEMLOCK", "ulimit -l"), ("open files", "RLIMIT_NOFILE", "ulimit -n 65536")],
)
def test_a_low_limit_of_the_process_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, which: str, remedy: str
) -> None:
    real = resource.getrlimit
    low = {getattr(resource, which): (1024, 1 << 20)}
    monkeypatch.setattr(resource, "getrlimit", lambda asked: low.get(asked) or real(asked))
    found = machine(tmp_path, {})[name]
    assert found.state == WARNING
    assert remedy in found.remedy


def test_a_container_is_told_with_what_it_costs(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": str(1 << 30),
        "sys/fs/cgroup/pod/memory.current": str(1 << 20),
    }
    limits = machine(tmp_path, files, {**NAMESPACES, "pid": "pid:[4026532000]"})
    assert limits["namespaces"].value == "own pid (a container)"
    assert "over tcp" in limits["namespaces"].effect
    assert limits["memory of the control group"].value == "1 MiB used of 1024 MiB"


def test_what_cannot_be_read_is_unknown_and_stops_nothing(tmp_path: Path) -> None:
    limits = {limit.name: limit for limit in machine_limits(tmp_path)}
    assert len(limits) == 13
    assert limits["huge pages"].state == UNKNOWN
    assert "not readable" in limits["huge pages"].value


def test_this_machine_can_be_looked_at() -> None:
    assert len(machine_limits()) == 13
