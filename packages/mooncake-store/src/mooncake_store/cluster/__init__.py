"""Several masters of one store, of which one leads: who, is decided by etcd, Redis or a file."""

from mooncake_store.cluster.contract import Coordination, Leader, Term
from mooncake_store.cluster.finding import is_cluster, open_coordination

__all__ = ["Coordination", "Leader", "Term", "is_cluster", "open_coordination"]
