"""Compiled core of mooncake_ep: placement of experts."""

from collections.abc import Sequence


def eplb_exact(layers: int, experts: int, replicas: int, groups: int, nodes: int, gpus: int, load: int, group_load: int, expert_of: int, replica_of: int, counts: int) -> None:
    """
    DeepSeek's placement. Addresses of float32 load [layers, experts] and group_load [layers, groups], and of
    int64 results: expert_of and replica_of [layers, replicas], counts [layers, experts].
    """

def eplb_rebalance(slots_of_rank: Sequence[int], active: Sequence[bool], layers: int, experts: int, min_replicas: int, apart: bool, max_moves: int, load: int, expert_of: int) -> bytes:
    """
    Change int64 expert_of [layers, slots] in place so that float32 load [layers, experts] is spread evenly.
    Returns the moves, four int64 each: layer, expert, source, destination. Raises ValueError without room.
    """
