"""
Compiled core of the nvmeof driver. The engine calls it through the capsule, without Python.
"""

from typing_extensions import CapsuleType


def driver() -> CapsuleType:
    """The driver's C function table, as a PyCapsule."""

def identify(url: str, host_nqn: str, header_digest: bool, data_digest: bool, timeout_s: float) -> tuple[int, str, dict[str, object]]:
    """
    Ask the target of a URL for its namespace: the mc_status, the reason, and what it is.
    """

def find_namespace(folder: str, identity: str) -> tuple[int, str, str]:
    """
    Look below a folder like /sys/block for a peer's namespace: the mc_status, the reason, its name.
    """
