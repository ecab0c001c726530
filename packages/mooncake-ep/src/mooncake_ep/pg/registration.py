"""Makes torch.distributed know the backends `mooncake` and `mooncake-cpu`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mooncake_ep.pg.bootstrap import make_engine
from mooncake_ep.pg.group import MooncakeProcessGroup
from mooncake_ep.pg.options import MooncakeBackendOptions

__all__ = ["register"]

_DEVICES = {"mooncake": ["cpu", "cuda"], "mooncake-cpu": ["cpu"]}


def register() -> None:
    """Register both backends, if they are not there."""
    for name, devices in _DEVICES.items():
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, _maker(name), extended_api=True, devices=devices)


def _maker(name: str) -> Any:
    def make(given: Any, pg_options: Any) -> MooncakeProcessGroup:
        options = pg_options if isinstance(pg_options, MooncakeBackendOptions) else MooncakeBackendOptions()
        rank, size = given.group_rank, given.group_size
        engine = make_engine(given.store, rank, size, options, given.timeout)
        return MooncakeProcessGroup(engine, rank, size, options, given.timeout, name)

    return make
