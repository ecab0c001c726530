"""
Compiled core of the nvlink driver. The engine calls it through the capsule, without Python.
"""

from typing_extensions import CapsuleType


def driver() -> CapsuleType:
    """The driver's C function table, as a PyCapsule."""

def prepare_allocator(library: str) -> str:
    """
    Loads the CUDA driver library for the allocator; returns why it cannot, or nothing.
    """

def allocation_failure() -> str:
    """Why the last allocation failed; empty: none did."""
