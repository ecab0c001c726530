"""The suite that every driver of the transfer engine has to pass."""

from __future__ import annotations

from mooncake_transfer.testing.ending import Ends
from mooncake_transfer.testing.fencing import Fences
from mooncake_transfer.testing.granting import Grants
from mooncake_transfer.testing.moving import MovesBytes
from mooncake_transfer.testing.notifying import Notifies
from mooncake_transfer.testing.refusing import Refuses

__all__ = ["DriverConformance"]


class DriverConformance(MovesBytes, Refuses, Grants, Ends, Fences, Notifies):
    """Subclass this in a test file of a driver; pytest then runs the whole suite on it.

    All of it goes through ``TransferEngine``, with peers in this process and in others. Every wait has a
    deadline, and a test that leaves a thread or a descriptor behind fails. Set on the subclass:

    Attributes:
        driver: the driver's name, as its DriverInfo has it.
        quirks: what it cannot do.
        driver_options: options for it, as in ``TransferConfig.driver_options``.
    """
