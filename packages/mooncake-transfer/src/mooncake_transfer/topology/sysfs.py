"""Reading sysfs and procfs below any root, without stumbling over what is missing or forbidden."""

from __future__ import annotations

import re
from pathlib import Path

from mooncake_transfer._memory.numa import parse_list

__all__ = ["PCI_ADDRESS", "Tree"]

PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
PCI_ROOT = re.compile(r"^pci[0-9a-f]{4,}:[0-9a-f]{2}$")


class Tree:
    """Files below ``root``. What is missing reads as nothing; what is forbidden does too, and is noted once.

    Attributes:
        notes: what could not be read although it is there, for people.
    """

    def __init__(self, root: str | Path):
        self.root = Path(root)
        self.notes: list[str] = []

    def text(self, path: str) -> str:
        """The file's content without blanks around it; empty when there is none."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            # A NIC that is down answers EINVAL for its speed: it has none, which is no news.
            if isinstance(error, PermissionError):
                self._note(f"cannot read {self.root / path}: {error.strerror}")
            return ""

    def number(self, path: str, default: int = 0) -> int:
        """The file's content as a number; ``default`` when there is none."""
        try:
            return int(self.text(path), 0)
        except ValueError:
            return default

    def numbers(self, path: str) -> list[int]:
        """The file's content in the kernel's list format, such as ``0-3,8``."""
        try:
            return parse_list(self.text(path))
        except ValueError:
            return []

    def names(self, folder: str) -> list[str]:
        """What is in a folder, in the order people count: eth2 before eth10."""
        try:
            return sorted((entry.name for entry in (self.root / folder).iterdir()), key=natural_order)
        except PermissionError as error:
            self._note(f"cannot list {self.root / folder}: {error.strerror}")
            return []
        except OSError:  # not there: a kernel or machine without such devices
            return []

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        try:
            return (self.root / path).exists()
        except OSError:  # forbidden: as good as absent
            return False

    def pci_path(self, device: str) -> tuple[str, ...]:
        """The PCI root and addresses on the way to ``device``, a link into the tree; empty without PCI."""
        try:
            parts = (self.root / device).resolve(strict=True).parts
        except (OSError, RuntimeError):  # no such device, or a loop of links
            return ()
        roots = [at for at, part in enumerate(parts) if PCI_ROOT.match(part)]
        if not roots:
            return ()
        found = [part for part in parts[roots[0] + 1 :] if PCI_ADDRESS.match(part)]
        return (parts[roots[0]], *found) if found else ()

    def numa_node(self, path: tuple[str, ...]) -> int:
        """The node of a PCI device: its own, or that of the nearest bridge above which says one."""
        for address in reversed(path[1:]):
            node = self.number(f"sys/bus/pci/devices/{address}/numa_node", -1)
            if node >= 0:
                return node
        return -1

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key that takes numbers in a name as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
