"""The command line of the lab."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from vm.guest import LAB_ERROR, boot
from vm.setup import PACKAGES, VOLATILE_CXL, set_up
from vm.shell import LabError, qemu_version, say

DESCRIPTION = """Boot a throw-away Debian guest in QEMU and run one command in it.

  hatch run lab --setup                            once per machine, as root
  hatch run lab --numa 2 --nics 4 -- CMD ...       run CMD in such a guest

Exit status: the command's own; 124 timed out; 125 the lab itself failed.
tests/lab/README.md says what each flag gives inside the guest."""
ROOT = Path(__file__).resolve().parents[3]
CACHE_VARIABLE = "MOONCAKE_LAB_CACHE"


def default_cache() -> Path:
    """Where kernel and initramfs are kept: as the environment says, else in the checkout's .hatch."""
    return Path(os.environ.get(CACHE_VARIABLE) or ROOT / ".hatch/lab")


def size_mib(text: str) -> int:
    """Parse a size such as 512M or 4G."""
    found = re.fullmatch(r"(\d+)\s*([MG])i?B?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 4G")
    return int(found[1]) * (1024 if found[2].upper() == "G" else 1)


def build_parser() -> argparse.ArgumentParser:
    """Describe every flag."""
    parser = argparse.ArgumentParser(
        prog="lab", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--kernel-cache",
        type=Path,
        default=default_cache(),
        metavar="DIR",
        help="kernel and initramfs (130 MB)",
    )
    add("--setup", action="store_true", help="install what is missing and fetch the kernel, then exit")
    add(
        "--with",
        dest="groups",
        default=",".join(PACKAGES),
        metavar="LIST",
        help="--setup: what the guest has",
    )
    add("--kernel", metavar="PACKAGE", help="--setup: this linux-image package, not the newest")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    _add_machine(parser.add_argument_group("the machine"))
    _add_preparation(parser.add_argument_group("what is set up before the command"))
    _add_command(parser.add_argument_group("the command"))
    return parser


def _add_machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--cpus", type=int, default=2)
    add("--mem", type=size_mib, default="4G", metavar="SIZE")
    add("--accel", choices=["auto", "kvm", "tcg"], default="auto", help="auto: what --setup found to work")
    add("--numa", type=int, default=1, metavar="N", help="N NUMA nodes with CPUs and memory")
    add("--far-mem", type=size_mib, metavar="SIZE", help="one more node, memory only, slower by ACPI")
    add("--nics", type=int, default=0, metavar="N", help="N PCI NICs on one switch, spread over the nodes")
    add("--nvme", type=int, default=0, metavar="N", help="N PCI NVMe drives of 256M, spread over the nodes")
    add("--cxl", choices=["ram", "pmem", "both"], nargs="?", const="ram", help="a CXL type-3 device")
    add("--cxl-size", type=size_mib, default="512M", metavar="SIZE")
    add(
        "--cxl-mode",
        choices=["devdax", "system-ram", "none"],
        default="devdax",
        help="none: left to the command",
    )
    add(
        "--hosts",
        type=int,
        choices=[1, 2],
        default=1,
        help="2: two guests on one wire, each runs it",
    )
    add("--append", action="append", default=[], metavar="ARG", help="one more kernel argument")


def _add_preparation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rdma", action="store_true", help="soft-RoCE devices rxe0 and rxe1 on a veth pair")
    add(
        "--nvmet",
        action="store_true",
        help="the kernel's NVMe-oF target: tcp, loop and, with --rdma, rdma",
    )
    add("--nvmet-size", type=size_mib, default="256M", metavar="SIZE")
    add("--nvme-connect", choices=["tcp", "rdma", "loop"], help="--nvmet: connect to it as well")
    add("--hugepages", type=int, default=0, metavar="N", help="N huge pages of 2M")
    add("--module", action="append", default=[], metavar="NAME", help="load this kernel module too")


def _add_command(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tree", type=Path, default=Path(), metavar="DIR", help="where the command runs (default: here)")
    add("--out", type=Path, metavar="DIR", help="shared read-write; all else that the guest writes is lost")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]")
    add("--timeout", type=int, default=600, metavar="SECONDS")
    add("--logs", type=Path, metavar="DIR", help="keep the guest's console, dmesg and set-up logs there")
    add("--quiet", action="store_true", help="no closing line of times")
    add("--show", action="store_true", help="print QEMU's command line")


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks; return the exit status."""
    parser = build_parser()
    flags = parser.parse_args(arguments)
    if flags.command[:1] == ["--"]:
        del flags.command[0]
    for name in ("kernel_cache", "tree", "out", "logs"):
        if getattr(flags, name) is not None:
            setattr(flags, name, getattr(flags, name).absolute())
    try:
        if flags.setup:
            groups = [group for group in flags.groups.split(",") if group]
            if unknown := [group for group in groups if group not in PACKAGES]:
                parser.error(f"no package group {', '.join(unknown)}; there are {', '.join(PACKAGES)}")
            set_up(flags.kernel_cache, groups, flags.kernel)
            return 0
        if fault := _fault(flags):
            parser.error(fault)
        if flags.out:
            flags.out.mkdir(parents=True, exist_ok=True)
        return boot(flags)
    except LabError as error:
        say(str(error))
        return LAB_ERROR
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _fault(flags: argparse.Namespace) -> str:
    """What is wrong with the flags; empty when nothing is."""
    if flags.cxl in ("ram", "both") and qemu_version() < VOLATILE_CXL:
        raise LabError("volatile CXL memory needs QEMU 8.2 or later: --cxl pmem works with this one")
    faults = {
        "give a command after --": not flags.command,
        "--numa and --cpus start at 1": flags.numa < 1 or flags.cpus < 1,
        "--nvme-connect needs --nvmet": flags.nvme_connect and not flags.nvmet,
        "--nvme-connect rdma needs --rdma": flags.nvme_connect == "rdma" and not flags.rdma,
        "--cxl-size must be a multiple of 256M": flags.cxl and flags.cxl_size % 256,
        f"no directory {flags.tree}": not flags.tree.is_dir(),
    }
    return next((text for text, wrong in faults.items() if wrong), "")
