"""A `torch.distributed` backend for CPU tensors that outlives its ranks. Importing this registers it.

```python
import torch.distributed as dist
from mooncake_ep import pg

dist.init_process_group("mooncake")  # or "cpu:mooncake,cuda:mooncake"
```
"""

from __future__ import annotations

from mooncake_ep.pg.errors import (
    CollectiveMismatch,
    GroupError,
    GroupTimeout,
    GroupUnavailable,
    RankEvicted,
    RankFailed,
)
from mooncake_ep.pg.group import MooncakeProcessGroup
from mooncake_ep.pg.membership import (
    FaultPoint,
    ProposalResponse,
    ProposalStatus,
    activate_ranks,
    deactivate_ranks,
    extend_group_size_to,
    get_active_ranks,
    get_failed_ranks_hint,
    get_local_success,
    get_num_synced_ranks,
    get_peer_state,
    inject_fault,
    join_group,
    recover_ranks,
    sync_after_failure,
)
from mooncake_ep.pg.options import MooncakeBackendOptions
from mooncake_ep.pg.registration import register
from mooncake_ep.pg.shrinking import shrink_group

__all__ = [
    "CollectiveMismatch",
    "FaultPoint",
    "GroupError",
    "GroupTimeout",
    "GroupUnavailable",
    "MooncakeBackendOptions",
    "MooncakeProcessGroup",
    "ProposalResponse",
    "ProposalStatus",
    "RankEvicted",
    "RankFailed",
    "activate_ranks",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "inject_fault",
    "join_group",
    "recover_ranks",
    "register",
    "shrink_group",
    "sync_after_failure",
]

register()
