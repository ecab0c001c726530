"""A cluster on this machine: store master, prefill and decode workers and conductor, each its own process."""

from mooncake_transformers.cluster._errors import (
    ClusterError,
    ClusterStopped,
    PortTaken,
    ProcessDied,
    ProcessError,
    ProcessNotReady,
    SpecError,
)
from mooncake_transformers.cluster.progress import OnProgress, Progress
from mooncake_transformers.cluster.spec import ClusterSpec
from mooncake_transformers.cluster.supervisor import Cluster

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterSpec",
    "ClusterStopped",
    "OnProgress",
    "PortTaken",
    "ProcessDied",
    "ProcessError",
    "ProcessNotReady",
    "Progress",
    "SpecError",
]
