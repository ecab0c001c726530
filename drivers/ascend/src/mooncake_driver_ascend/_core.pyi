"""
Compiled core of the ascend driver. The engine calls it through the capsule, without Python.
"""

from typing_extensions import CapsuleType


def driver() -> CapsuleType:
    """The driver's C function table, as a PyCapsule."""
