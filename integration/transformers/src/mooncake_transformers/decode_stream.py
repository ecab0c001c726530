"""From the model's thread to the event loop: the tokens of one answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from mooncake_transformers.answer import Answer, TokenStep
from mooncake_transformers.kv_cache import SequenceCache
from mooncake_transformers.metrics import WorkerMetrics
from mooncake_transformers.runner import DecodeJob, ModelRunner

__all__ = ["DecodeStream"]


class DecodeStream:
    """An answer that the runner continues. Belongs to one event loop.

    ``blocks`` and ``block_tokens`` say what ``cache`` is to be loaded from, if it is empty. ``job.done``
    tells when the runner has let go of them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        metrics: WorkerMetrics,
        cache: SequenceCache,
        answer: Answer,
        blocks: Sequence[int] = (),
        block_tokens: int = 0,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._runner = runner
        self._metrics = metrics
        self._steps: asyncio.Queue[TokenStep | None] = asyncio.Queue()
        self.job = DecodeJob(
            cache=cache,
            answer=answer,
            on_step=lambda step: _hand_over(loop, self._steps, step),
            blocks=blocks,
            block_tokens=block_tokens,
        )
        self.job.done.add_done_callback(lambda _: _hand_over(loop, self._steps, None))

    async def steps(self) -> AsyncGenerator[TokenStep, None]:
        """The tokens, as they come; closing it cancels the job. Raises ModelFailed, WorkerStopping."""
        self._runner.decode(self.job)
        previous_s = time.monotonic()
        try:
            while (step := await self._steps.get()) is not None:
                now_s = time.monotonic()
                self._metrics.token_seconds.observe(now_s - previous_s)
                self._metrics.generated_tokens.inc()
                previous_s = now_s
                yield step
            self.job.done.result()
        finally:
            self._runner.cancel(self.job)


def _hand_over(
    loop: asyncio.AbstractEventLoop, steps: asyncio.Queue[TokenStep | None], step: TokenStep | None
) -> None:
    loop.call_soon_threadsafe(steps.put_nowait, step)
