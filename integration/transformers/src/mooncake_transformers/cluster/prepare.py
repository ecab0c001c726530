"""What is done once, before any process of a cluster starts."""

from __future__ import annotations

from mooncake_transformers.cluster.preflight import check_can_start
from mooncake_transformers.cluster.spec import ClusterSpec
from mooncake_transformers.config import DEFAULT_MODEL, calm_openmp
from mooncake_transformers.default_model import ensure_default_model

__all__ = ["prepare"]


def prepare(spec: ClusterSpec) -> str:
    """Refuse what cannot start, and make the default model with a progress bar unless it is made already.

    Done here because the workers' own output goes to log files, and because all of them would wait for one.
    Returns what transformers loads the model from. Raises SpecError, PortTaken, DefaultModelUnavailable.
    """
    check_can_start(spec)
    if spec.model != DEFAULT_MODEL:
        return spec.model
    calm_openmp()
    return str(ensure_default_model())
