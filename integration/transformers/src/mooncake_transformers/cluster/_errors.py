"""Exceptions of mooncake_transformers.cluster.

::

    ClusterError
    ├─ SpecError
    ├─ PortTaken
    ├─ ProcessError   ─ ProcessDied · ProcessNotReady
    └─ ClusterStopped

When one is raised while a cluster starts, what had been started is stopped before the caller sees it.
"""

from __future__ import annotations


class ClusterError(Exception):
    """Base of every error of a cluster on this machine."""


class SpecError(ClusterError, ValueError):
    """The description of the cluster cannot work; nothing was started."""


class PortTaken(ClusterError):
    """Somebody else listens on the port asked for; nothing was started."""


class ProcessError(ClusterError):
    """Something about one process of the cluster.

    Attributes:
        process: the process's name in the cluster, for example ``"prefill-0"``.
        log_tail: the last lines it logged, oldest first; empty when it logged nothing.
    """

    def __init__(self, process: str, message: str, log_tail: list[str]) -> None:
        self.process = process
        self.log_tail = log_tail
        super().__init__(f"{process}: {message}")


class ProcessDied(ProcessError):
    """The process ended without being asked to. Its own last words are part of the message."""


class ProcessNotReady(ProcessError):
    """The process did not say that it is ready before the deadline, and has been stopped."""


class ClusterStopped(ClusterError):
    """Somebody asked the cluster to stop while it was starting."""
