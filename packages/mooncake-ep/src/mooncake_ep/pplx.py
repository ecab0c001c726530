"""`AllToAll` with the interface of pplx-kernels: the low-latency mode into tensors of the caller."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mooncake_ep import buffer as deepep
from mooncake_ep._errors import ShapeError
from mooncake_ep.exchange.handle import Handle
from mooncake_ep.group_buffer import DEFAULT_TIMEOUT_US

__all__ = ["AllToAll"]

GROUP = 128


class AllToAll:
    """Dispatch and combine of one rank; made by `intranode` or `internode`, on all ranks at once.

    Both halves of a call may be apart: first with `do_recv=False`, then with `do_send=False`. Ranks that die
    or are late are given up as in `Buffer`; `buffer` is the one below, for its masks and for
    `update_ep_member`.
    """

    def __init__(self, buffer: deepep.Buffer, sizes: tuple[int, int, int, int], has_scales: bool) -> None:
        self.buffer = buffer
        self._max_tokens, self._num_experts, self._topk, self._hidden = sizes
        self._has_scales = has_scales
        self._dispatched: tuple[deepep.Received, torch.Tensor, Handle, deepep.Hook] | None = None
        self._combined: tuple[torch.Tensor, deepep.Hook] | None = None

    @classmethod
    def intranode(
        cls,
        max_num_tokens: int,
        num_experts: int,
        experts_per_token: int,
        rank: int,
        world_size: int,
        dp_size: int,
        hidden_dim: int,
        hidden_dim_bytes: int,
        hidden_dim_scale_bytes: int,
        group_name: str = "default",
        max_sm_count: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        timeout_us: int = DEFAULT_TIMEOUT_US,
    ) -> AllToAll:
        """Make one for the ranks of `group` (None: all), which are on one host.

        Rows are bf16 (`hidden_dim_bytes` 2 * hidden), or e4m3 with a float32 scale for each 128 channels
        (`hidden_dim_scale_bytes` 4 * hidden / 128). What tunes a GPU, and names a group of it, changes
        nothing. Raises ShapeError for other rows, for another rank or size than the group's, and for
        `dp_size` other than 1: ranks that have the same tokens are not there.
        """
        of = dist.group.WORLD if group is None else group
        assert of is not None, "init_process_group comes first"
        if (rank, world_size) != (dist.get_rank(of), dist.get_world_size(of)) or dp_size != 1:
            raise ShapeError(
                f"rank {rank} of {world_size} with dp_size {dp_size}: the group has this as rank "
                f"{dist.get_rank(of)} of {dist.get_world_size(of)}, and dp_size must be 1"
            )
        scales = 4 * (hidden_dim // GROUP) if hidden_dim_bytes == hidden_dim else 0
        if hidden_dim_bytes not in (hidden_dim, 2 * hidden_dim) or hidden_dim_scale_bytes != scales:
            raise ShapeError(
                f"rows of {hidden_dim} channels in {hidden_dim_bytes} bytes with {hidden_dim_scale_bytes} of "
                f"scales: give bfloat16 without scales, or e4m3 with a float32 for each {GROUP} channels"
            )
        made = cls(
            deepep.Buffer(of), (max_num_tokens, num_experts, experts_per_token, hidden_dim), bool(scales)
        )
        made._timeout_us = timeout_us
        return made

    # Both take the same arguments; between hosts, buffers are not there yet, which PeerError says.
    internode = intranode
    _timeout_us = DEFAULT_TIMEOUT_US

    def dispatch(
        self,
        out_expert_num_tokens: torch.Tensor,
        out_expert_x: torch.Tensor,
        out_expert_x_scale: torch.Tensor | None,
        dp_x: torch.Tensor,
        dp_x_scale: torch.Tensor | None,
        indices: torch.Tensor,
        bound_m: torch.Tensor | None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        """Send the first `bound_m` (None: all) tokens of `dp_x` [tokens, hidden] to the experts of `indices`.

        `indices` [tokens, experts per token] of any integer type. Writes how many tokens each local expert
        got, and their rows, in order of source rank: [local experts, world size * max tokens, hidden].
        """
        if self._has_scales != (dp_x_scale is not None) or self._has_scales != (
            out_expert_x_scale is not None
        ):
            raise ShapeError("scales go with e4m3 rows, on both sides, and with no others")
        if do_send:
            count = len(dp_x) if bound_m is None else int(bound_m)
            x = dp_x[:count] if dp_x_scale is None else (dp_x[:count], dp_x_scale[:count])
            received, counts, handle, _, hook = self.buffer.low_latency_dispatch(
                x, indices[:count].to(torch.int64), self._max_tokens, self._num_experts,
                use_fp8=self._has_scales, return_recv_hook=True, timeout_us=self._timeout_us,
            )  # fmt: skip
            self._dispatched = (received, counts, handle, hook)
        if do_recv:
            received, counts, _, hook = self._sent()
            hook()
            out_expert_num_tokens.copy_(counts)
            rows, scales = received if isinstance(received, tuple) else (received, None)
            for expert, count in enumerate(counts.tolist()):
                out_expert_x[expert, :count].copy_(rows[expert, :count])
                if scales is not None and out_expert_x_scale is not None:
                    out_expert_x_scale[expert, :count].copy_(scales[expert, :count])

    def combine(
        self,
        out_tokens: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        expert_y: torch.Tensor,
        bound_m: torch.Tensor | None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        """Bring bf16 `expert_y`, of the shape of the dispatch's rows, into `out_tokens` [tokens, hidden].

        `indices` are those of the dispatch, `weights` float32 of that shape. Rows of `out_tokens` behind the
        last token are left as they are.
        """
        count = len(self._sent()[2].topk_idx)
        if do_send:
            combined, _, hook = self.buffer.low_latency_combine(
                expert_y, indices[:count].to(torch.int64), weights[:count], self._sent()[2],
                return_recv_hook=True, timeout_us=self._timeout_us,
            )  # fmt: skip
            self._combined = (combined, hook)
        if do_recv:
            if self._combined is None:
                raise ShapeError("nothing was sent: call combine with do_send first")
            combined, hook = self._combined
            hook()
            out_tokens[:count].copy_(combined)
            self._combined = None

    def _sent(self) -> tuple[deepep.Received, torch.Tensor, Handle, deepep.Hook]:
        if self._dispatched is None:
            raise ShapeError("nothing was dispatched: call dispatch with do_send first")
        return self._dispatched

    def destroy(self) -> None:
        """Let go of the other ranks' memory."""
        self.buffer.destroy()
