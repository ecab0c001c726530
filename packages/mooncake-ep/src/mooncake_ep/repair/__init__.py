"""Brings weights of experts to the slots that a new placement gives them, while the ranks go on serving.

`eplb.rebalance` says what is to be moved. `start_repair` reads it from the ranks that have it, by the
transfer engine, in the background; `Repair.commit` puts it in place once every rank has its part.
`HostBackup` keeps copies of experts that only one rank is left with.
"""

from __future__ import annotations

from mooncake_ep.repair.backup import HostBackup
from mooncake_ep.repair.copying import CopyJob
from mooncake_ep.repair.moving import Repair, start_repair
from mooncake_ep.repair.sources import last_copies
from mooncake_ep.repair.weights import Offer, SlotWeights

__all__ = ["CopyJob", "HostBackup", "Offer", "Repair", "SlotWeights", "last_copies", "start_repair"]
