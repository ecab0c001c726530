"""Compiled core of mooncake_driver_tcp."""

from typing_extensions import CapsuleType


def driver() -> CapsuleType:
    """
    The function table of abi/mooncake_driver.h, in a capsule named "mooncake.driver.v1".
    """
