"""One worker: the model, its memory, its part in the store and in hand-offs, and the HTTP server in front."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
import uvicorn

from mooncake_store import Store, keys
from mooncake_store.kv_events.publisher import KVEventPublisher
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.listening import join_address, listen
from mooncake_transformers._errors import ConfigError, PortTaken
from mooncake_transformers.blocks import BlockWaiters
from mooncake_transformers.config import WorkerConfig
from mooncake_transformers.generation import GenerationParts, GenerationService
from mooncake_transformers.handoff import HandoffClient, HandoffTable
from mooncake_transformers.kv_layout import KVLayout
from mooncake_transformers.kv_pool import KVPool
from mooncake_transformers.metrics import WorkerMetrics
from mooncake_transformers.model import load_model
from mooncake_transformers.planning import Planner
from mooncake_transformers.prefill import Prefiller
from mooncake_transformers.prefix_store import PrefixStore
from mooncake_transformers.runner import ModelRunner
from mooncake_transformers.server import build_app

__all__ = ["Worker"]

logger = logging.getLogger(__name__)
HANDOFF_THREADS = 8
GRACE_S = 2
# Blocks are handed out from the front of the pool; page faults there would delay the first requests.
WARM_POOL_BYTES = 128 << 20


class Worker:
    """A worker, made ready by its constructor, and run by ``serve`` in an event loop.

    The HTTP port is taken first, so that a wrong one fails before the model is loaded. ``close`` must be
    called unless ``serve`` has run. Raises PortTaken, ModelError and its kinds, ConfigError, and what the
    engine and the store raise (MemoryUnavailable, MasterUnreachable, DriverUnavailable). Nothing is left
    behind then.

    Attributes:
        url: where HTTP is served.
        engine_id: new for every worker.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.engine_id = uuid.uuid4().hex
        self.metrics = WorkerMetrics()
        self._server: uvicorn.Server | None = None
        self._stopping = False
        self._service: GenerationService | None = None
        self._handoffs: HandoffTable | None = None
        with ExitStack() as stack:
            self._socket = stack.enter_context(contextlib.closing(_listen(config.host, config.port)))
            self.url = f"http://{join_address(self._known_host, self._socket.getsockname()[1])}"
            self._open(stack)
            self._resources = stack.pop_all()

    def _open(self, stack: ExitStack) -> None:
        """Everything that needs no event loop; given back by ``stack`` in reverse order."""
        config = self.config
        torch.set_num_threads(config.thread_count)
        self.model = load_model(config)
        layout = self.model.layout(config.block_tokens)
        _check_blocks(config, layout, self.model.context_tokens)
        transfer_config = TransferConfig(
            host=config.host, advertise_host=config.advertise_host, drivers=config.drivers
        )
        # Hand-off threads wait for other engines; closing ours ends their waits, so they are joined after it.
        self._handoff_threads = stack.enter_context(ThreadPoolExecutor(HANDOFF_THREADS, "handoff"))
        self.engine = stack.enter_context(TransferEngine(transfer_config))
        self._region = self.engine.allocate(config.kv_pool_bytes, name="kv-pool", prefault=True)
        self.pool = KVPool(layout, self._region.view())
        self.pool.touch(WARM_POOL_BYTES)
        any_port = f"tcp://{join_address(config.host, 0)}"
        self._publisher = stack.enter_context(KVEventPublisher(any_port, any_port))
        self._store = stack.enter_context(Store(self.engine, config.store, lend_bytes=config.lent_bytes))
        root = keys.root_digest(self.model.fingerprint, config.block_tokens, layout=layout.description)
        self._prefix_store = PrefixStore(
            self._store, self.pool, self._region, root, self._publisher, self.metrics
        )
        self._store_thread = stack.enter_context(ThreadPoolExecutor(1, "store"))
        self.runner = ModelRunner(
            self.model, self.pool, chunk_tokens=config.prefill_chunk_tokens, threads=config.thread_count
        )
        stack.callback(self.runner.close)
        self.runner.start()
        longest = min(self.model.context_tokens, self.pool.capacity_tokens)
        if longest < self.model.context_tokens:
            logger.warning(
                "the KV pool holds %d tokens, less than the model's context of %d: no sequence may be longer",
                longest,
                self.model.context_tokens,
            )
        self.planner = Planner(self.model, config.role, longest)
        self._watch_gauges()

    def _watch_gauges(self) -> None:
        watch = self.metrics.watch
        watch("pool_blocks", "KV blocks in the pool.", lambda: self.pool.block_count)
        watch("pool_free_blocks", "KV blocks that are free.", lambda: self.pool.free_count)
        watch("running", "Answers under way.", lambda: self._service.running if self._service else 0)
        watch("waiting", "Requests that wait.", lambda: self._service.waiting if self._service else 0)

    # ---- what the HTTP API asks

    @property
    def service(self) -> GenerationService:
        """Serves generations. Only while ``serve`` runs."""
        assert self._service is not None, "the worker does not serve yet"
        return self._service

    @property
    def healthy(self) -> bool:
        """Whether requests can be served."""
        return self.runner.alive

    def describe(self) -> dict[str, object]:
        """The body of ``GET /worker``."""
        return {
            "engine_id": self.engine_id,
            "epoch": self.engine.epoch,
            "role": self.config.role,
            "model": self.model.name,
            "block_tokens": self.config.block_tokens,
            "max_model_len": self.planner.max_model_len,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "transfer": self.engine.address,
            "kv_events": self._reachable(self._publisher.endpoint),
            "kv_events_replay": self._reachable(self._publisher.replay_endpoint),
            "running": self.service.running,
            "waiting": self.service.waiting,
            "pool_free_blocks": self.pool.free_count,
            "pool_blocks": self.pool.block_count,
        }

    def transfer_params(self, transfer_id: str) -> dict[str, object]:
        """The ``kv_transfer_params`` of a prefill's answer."""
        host, _, port = self.engine.address.rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": self.engine_id,
            "remote_host": host.strip("[]"),
            "remote_port": int(port),
        }

    def release(self, transfer_id: str) -> bool:
        """Free a prompt that is held for a decode worker; whether it was held. Only while ``serve`` runs."""
        assert self._handoffs is not None, "the worker does not serve yet"
        return self._handoffs.release(transfer_id)

    # ---- life

    async def serve(self, on_ready: Callable[[], None] = lambda: None, *, signals: bool = True) -> None:
        """Serve until SIGTERM or SIGINT (with ``signals``), or ``stop``; then close. ``on_ready`` is called
        when requests are taken.

        When it stops, requests under way fail with WorkerStopping.
        """
        try:
            waiters = self._make_service()
            server = _Server(self._uvicorn_config(), on_ready)
            self._server = server
            server.should_exit = self._stopping
            if signals:
                loop = asyncio.get_running_loop()
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, self.stop)
            await server.serve(sockets=[self._socket])
            waiters.close()
        finally:
            await asyncio.to_thread(self.close)

    def stop(self) -> None:
        """End ``serve``. May be called from a signal handler or another thread."""
        self._stopping = True
        self.runner.stop()
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        self._resources.close()

    def _make_service(self) -> BlockWaiters:
        """What belongs to the event loop."""
        config, loop = self.config, asyncio.get_running_loop()
        waiters = BlockWaiters(self.pool, wait_s=config.pool_wait_s, max_waiting=config.max_waiting)
        prefiller = Prefiller(
            self.model, self.runner, self.pool, self._prefix_store, waiters, self._store_thread, self.metrics
        )
        handoffs = self._handoffs = HandoffTable(
            self.engine, self.pool, deadline_s=config.handoff_deadline_s, call_later=loop.call_later
        )
        self._service = GenerationService(
            GenerationParts(
                engine_id=self.engine_id,
                model=self.model,
                runner=self.runner,
                pool=self.pool,
                region=self._region,
                prefix_store=self._prefix_store,
                waiters=waiters,
                prefiller=prefiller,
                handoffs=handoffs,
                client=HandoffClient(self.engine, self._region, self.pool, self._prefix_store.root),
                metrics=self.metrics,
                store_thread=self._store_thread,
                handoff_threads=self._handoff_threads,
                store_decoded=config.store_decoded and self._prefix_store.lends,
                max_running=config.max_running,
            )
        )
        self.metrics.watch("handoffs_held", "Prompts held for decode workers.", lambda: len(handoffs))
        return waiters

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            build_app(self),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )

    @property
    def _known_host(self) -> str:
        return self.config.advertise_host or self.config.host

    def _reachable(self, endpoint: str) -> str:
        """The endpoint as others reach it: a wildcard address is where we listen, not where we are."""
        _, _, port = endpoint.rpartition(":")
        return f"tcp://{join_address(self._known_host, int(port))}"


class _Server(uvicorn.Server):
    """uvicorn, which tells when it takes requests and leaves signals to the worker."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _check_blocks(config: WorkerConfig, layout: KVLayout, context_tokens: int) -> None:
    """Raises ConfigError where no block would ever be full, or find room in the lent memory."""
    if config.block_tokens > context_tokens:
        raise ConfigError(
            f"a block of {config.block_tokens} tokens is longer than the model's context of "
            f"{context_tokens}, so none would ever be full; give fewer with --block-tokens, for example 16"
        )
    if 0 < config.lent_bytes < layout.block_bytes:
        raise ConfigError(
            f"{config.lent_bytes} bytes lent to the store hold no KV block: one of {config.block_tokens} "
            f"tokens has {layout.block_bytes}; lend more (--lend of a worker, --segment of a cluster), or 0"
        )


def _listen(host: str, port: int) -> socket.socket:
    where = join_address(host, port)
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"cannot serve at {where}: this machine does not have the address {host}; give one "
                "that it has with --host"
            ) from error
        raise PortTaken(
            f"cannot serve at {where}: {error.strerror or error}; "
            "choose another --port, or 0 for any free one"
        ) from error
