"""All ranks say the same of one that is late, whatever each one's own patience."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mooncake_ep.pg  # noqa: F401 - registers the backend
from mooncake_ep import Buffer, PeerError

HIDDEN, EXPERTS, SIZE = 128, 3, 3
PATIENT_US = 100_000_000


def call(buffer: Buffer, number: float, timeout_us: int) -> tuple[list[int], torch.Tensor]:
    """One token to the expert of each rank and back; who was there, and the sum of what came back."""
    active = torch.ones(SIZE, dtype=torch.int32)
    x = torch.full((1, HIDDEN), number, dtype=torch.bfloat16)
    topk_idx = torch.arange(EXPERTS)[None]
    received, _, handle, _, _ = buffer.low_latency_dispatch(
        x, topk_idx, 4, EXPERTS, use_fp8=False, active_ranks=active, timeout_us=timeout_us
    )
    weights = torch.ones(1, EXPERTS)
    combined, _, _ = buffer.low_latency_combine(
        received, topk_idx, weights, handle, active_ranks=active, timeout_us=timeout_us
    )
    return active.tolist(), combined[0, 0].int()


def test_one_impatient_rank_decides_for_all_and_the_late_one_is_told(ranks: Any, tmp_path: Path) -> None:
    """Rank 2 comes to its second call once rank 0 has given it up; rank 1 would have waited for it."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        buffer = Buffer(group)
        found = [call(buffer, 1.0, PATIENT_US)]
        given_up = tmp_path / "given up"
        if rank == 2:
            while not given_up.exists():
                pass
            with pytest.raises(PeerError, match="went on without rank 2"):
                call(buffer, 2.0, PATIENT_US)
        else:
            found.append(call(buffer, 2.0, 5000 if rank == 0 else PATIENT_US))
            given_up.touch()
            found.append(call(buffer, 3.0, PATIENT_US))
        buffer.update_ep_member()
        found.append(call(buffer, 4.0, PATIENT_US))
        dist.barrier(group)
        return [(active, int(value)) for active, value in found]

    whole, without = [1, 1, 1], [1, 1, 0]
    expected = [(whole, 3), (without, 4), (without, 6), (whole, 12)]
    assert ranks(SIZE, work) == [expected, expected, [expected[0], expected[3]]]


def test_what_was_posted_before_a_rank_was_given_up_counts_for_all(ranks: Any, tmp_path: Path) -> None:
    """Rank 2 dispatches and then is late with its results: its tokens are there, its expert's results not."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        buffer = Buffer(group)
        active = torch.ones(SIZE, dtype=torch.int32)
        x = torch.full((1, HIDDEN), rank + 1.0, dtype=torch.bfloat16)
        topk_idx, weights = torch.arange(EXPERTS)[None], torch.ones(1, EXPERTS)
        received, counts, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, 4, EXPERTS, use_fp8=False, active_ranks=active, timeout_us=PATIENT_US
        )
        given_up = tmp_path / "given up"
        if rank == 2:
            while not given_up.exists():
                pass
            with pytest.raises(PeerError, match="went on without rank 2"):
                buffer.low_latency_combine(received, topk_idx, weights, handle, timeout_us=PATIENT_US)
            return None
        combined, _, _ = buffer.low_latency_combine(
            received, topk_idx, weights, handle, active_ranks=active,
            timeout_us=5000 if rank == 1 else PATIENT_US,
        )  # fmt: skip
        given_up.touch()
        return counts.tolist(), active.tolist(), int(combined[0, 0])

    assert ranks(SIZE, work) == [([3], [1, 1, 0], 2), ([3], [1, 1, 0], 4), None]


def test_ranks_of_a_group_that_goes_on_without_one_meet_around_the_hole(ranks: Any) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Any:
        lasting = dist.new_group(backend="mooncake")
        buffer = Buffer(lasting)
        assert call(buffer, 1.0, PATIENT_US) == ([1, 1, 1], 3)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        buffer.update_ep_member()
        found = [call(buffer, 2.0, PATIENT_US)]
        buffer.low_latency_clean_mask_buffer()  # it cannot bring back who is not there
        found.append(call(buffer, 3.0, PATIENT_US))
        return [(active, int(value)) for active, value in found]

    expected = [([1, 0, 1], 4), ([1, 0, 1], 6)]
    assert ranks(SIZE, work) == [expected, None, expected]
