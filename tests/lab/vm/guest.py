"""Booting guests, running the command in them, bringing its output and exit status back."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from vm.kernel import Kernel, ensure_initramfs, installed_kernel
from vm.machine import Machine
from vm.shell import QEMU, TOOLS, LabError, say, stop

LAB_ERROR, TIMED_OUT = 125, 124
PASSED_ON = ("VIRTUAL_ENV", "PYTHONPATH", "PYENV_VERSION", "PYENV_ROOT", "LD_LIBRARY_PATH", "CI")
LOGS = ("console.log", "setup.log", "dmesg.log", "qemu.err")


def settings(flags: argparse.Namespace, rank: int, kernel: Kernel) -> str:
    """Return the shell assignments that guest-setup reads."""
    values = {
        "RANK": rank,
        "HOSTS": flags.hosts,
        "RDMA": int(flags.rdma),
        "NVMET": int(flags.nvmet),
        "NVME_CONNECT": flags.nvme_connect or "",
        "NVMET_SIZE": flags.nvmet_size,
        "CXL": flags.cxl or "",
        "CXL_MODE": flags.cxl_mode,
        "CXL_SIZE": flags.cxl_size,
        "NICS": flags.nics,
        "NVME": flags.nvme,
        "FAR": flags.far_mem or 0,
        "FAR_NODE": flags.numa if flags.far_mem else "",
        "MODULES": " ".join(flags.module),
        "KERNEL_MODULES": kernel.modules,
        "RELEASE": kernel.release,
        "OUT": flags.out or "",
        "CWD": flags.tree,
        "TOOLS": TOOLS,
        "HUGEPAGES": flags.hugepages,
        "TRACE": os.environ.get("VMLAB_TRACE", ""),
    }
    return "".join(f"LAB_{name}={shlex.quote(str(value))}\n" for name, value in values.items())


def command_script(flags: argparse.Namespace) -> str:
    """Return the script that the guest runs: the environment that goes along, and the command."""
    passed = {
        "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    passed |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    for item in flags.env:
        name, given, value = item.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LabError(f"--env {item!r} is not NAME=VALUE")
        passed[name] = value if given else os.environ.get(name, "")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in passed.items())
    return f"{exports}exec {shlex.join(flags.command)}\n"


class Guest:
    """One guest that runs: its process, and the threads that carry its output."""

    def __init__(self, flags: argparse.Namespace, rank: int, work: Path, kernel: Kernel):
        self.flags, self.rank, self.work = flags, rank, work
        self.prefix = f"[host{rank}] ".encode() if flags.hosts > 1 else b""
        (work / "settings").write_text(settings(flags, rank, kernel))
        (work / "command").write_text(command_script(flags))
        listeners = [self._listen("out.sock", sys.stdout), self._listen("err.sock", sys.stderr)]
        self.accelerator, command = Machine(flags, rank, work, kernel).command()
        if flags.show:
            say("qemu: " + shlex.join(command))
        self.started_s = time.time()
        with (work / "qemu.err").open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
            )
        self.threads = [threading.Thread(target=self._carry, args=each, daemon=True) for each in listeners]
        for thread in self.threads:
            thread.start()

    def result(self, late: bool) -> int:
        """Return the command's exit status; say why on stderr where the lab failed or time ran out."""
        for thread in self.threads:
            thread.join(5)
        status = self._read("rc").strip()
        who = f"host{self.rank}: " if self.flags.hosts > 1 else ""
        if status.isdigit() and not late:
            if not self.flags.quiet:
                boot = [*self._read("boot").split(), "0", "?"]
                took = self._read("took").strip() or "?"
                up_s = float(boot[0]) - self.started_s
                say(
                    f"{who}{self.accelerator}, boot {up_s:.1f} s, set-up {boot[1]} s, "
                    f"command {took} s, exit {status}"
                )
            return int(status)
        say(
            f"{who}timed out after {self.flags.timeout} s" if late else f"{who}the guest ended without status"
        )
        for name in ("qemu.err", "console.log", "setup.log"):
            if tail := self._read(name).strip().splitlines()[-25:]:
                say(f"{who}{name}, last lines:\n  " + "\n  ".join(tail))
        return TIMED_OUT if late else LAB_ERROR

    def keep_logs(self, folder: Path) -> None:
        """Copy console, set-up log and dmesg to ``folder``."""
        place = folder / f"guest{self.rank}"
        place.mkdir(parents=True, exist_ok=True)
        for name in LOGS:
            if (self.work / name).exists():
                shutil.copy(self.work / name, place)

    def _listen(self, name: str, stream: TextIO) -> tuple[socket.socket, TextIO]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.work / name))
        listener.listen(1)
        return listener, stream

    def _carry(self, listener: socket.socket, stream: TextIO) -> None:
        """Write what the guest sends on one channel, by whole lines where several guests write."""
        listener.settimeout(30)
        with listener, contextlib.suppress(OSError):  # QEMU ended before or while it was connected
            connection, _ = listener.accept()
            connection.settimeout(None)
            rest = b""
            with connection:
                while data := connection.recv(65536):
                    if self.prefix:
                        *lines, rest = (rest + data).split(b"\n")
                        data = b"".join(self.prefix + line + b"\n" for line in lines)
                    stream.buffer.write(data)
                    stream.flush()
            if rest:
                stream.buffer.write(self.prefix + rest + b"\n")
                stream.flush()

    def _read(self, name: str) -> str:
        try:
            return (self.work / name).read_text(errors="replace")
        except OSError:
            return ""


def boot(flags: argparse.Namespace) -> int:
    """Boot the guests, wait for the command, return its exit status: the first that is not 0."""
    kernel = installed_kernel(flags.kernel_cache)
    if kernel is None:
        raise LabError(f"no kernel under {flags.kernel_cache}: run --setup first")
    if not shutil.which(QEMU):
        raise LabError(f"{QEMU} is missing: run --setup first")
    ensure_initramfs(kernel)
    guests: list[Guest] = []
    with tempfile.TemporaryDirectory(prefix="vmlab-", ignore_cleanup_errors=True) as top, _interruptible():
        flags.lab = Path(top, "lab")
        flags.lab.mkdir()
        try:
            for rank in range(flags.hosts):
                work = Path(top, f"guest{rank}")
                work.mkdir()
                guests.append(Guest(flags, rank, work, kernel))
            end_s = time.monotonic() + flags.timeout
            while any(guest.process.poll() is None for guest in guests) and time.monotonic() < end_s:
                time.sleep(0.05)
            late = [guest.process.poll() is None for guest in guests]
        finally:
            for guest in guests:
                stop(guest.process)
        statuses = [guest.result(is_late) for guest, is_late in zip(guests, late, strict=True)]
        if flags.logs:
            for guest in guests:
                guest.keep_logs(flags.logs)
    return next((status for status in statuses if status), 0)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turn signals that would end this program at once into KeyboardInterrupt, so that guests end with it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
