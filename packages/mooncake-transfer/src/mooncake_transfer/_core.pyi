"""
Compiled core of mooncake_transfer: engine and channel. Import it through mooncake_transfer.engine.
"""

from collections.abc import Sequence
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray
from typing_extensions import CapsuleType


class Channel:
    """
    Framed requests and notifications between engines; one thread of its own.
    """

    def __init__(self, *, queued_messages: int = 4096, queued_bytes: int = 67108864, unsent_bytes: int = 16777216, max_answers: int = 268435456, ungreeted: int = 512, greeting_s: float = 10.0, silence_s: float = 15.0) -> None: ...

    def use_tls(self, ca_file: str, certificate_file: str, key_file: str, verify_host: bool) -> None: ...

    def listen(self, host: str, port: int, last_port: int = 0) -> None: ...

    @property
    def port(self) -> int: ...

    def reserve(self, method: str) -> None: ...

    def serve_compiled(self, method: str, capsule: object) -> None: ...

    def start(self, hello: bytes) -> None: ...

    def close(self) -> None: ...

    def connect(self, host: str, port: int, timeout_s: float) -> tuple[int, bytes]: ...

    def call(self, connection: int, method: str, body: bytes, timeout_s: float) -> tuple[bool, bytes]: ...

    def notify(self, connection: int, method: str, body: bytes, timeout_s: float) -> None: ...

    def alive(self, connection: int) -> bool: ...

    def disconnect(self, connection: int) -> None: ...

    def hello_of(self, connection: int) -> bytes: ...

    def certificate_of(self, connection: int) -> bytes: ...

    def next_request(self, timeout_s: float, after: int = 0, own: bool = False) -> tuple[str, int, int, str, bytes] | None: ...

    def next_event(self, timeout_s: float) -> tuple[str, int, int, str, bytes] | None: ...

    def reply(self, connection: int, request: int, failed: bool, body: bytes) -> None: ...

class Region:
    """Registered local memory."""

    def enter(self) -> bool:
        """Keeps it from being closed; false when it is closing."""

    def leave(self) -> None: ...

class Peer:
    """Another engine, as the drivers reach it."""

class RemoteRegion:
    """A peer's region and the rails that lead there."""

class Engine:
    """Drivers, regions and transfers; one progress thread of its own."""

    def __init__(self, channel: Channel) -> None: ...

    def add_endpoint(self, capsule: object, driver: str, device: str, numa_node: int, options: list[tuple[str, str]]) -> None: ...

    def set_policy(self, breaker_errors: int, breaker_window_s: float, breaker_pause_s: float, breaker_max_pause_s: float, suspect_pause_s: float, slow_ratio: float, probe_every: int, slice_bytes: int, attempts: int, aging_s: float) -> None: ...

    def set_numa_distances(self, distances: Sequence[Sequence[int]]) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None: ...

    def addresses(self) -> list[tuple[str, str, bytes]]: ...

    def register_region(self, kind: int, device: int, address: int, length: int, fd: int, fd_offset: int, numa_node: int, region_id: int, key: bytes, name: str, location: str = '') -> Region: ...

    def export_keys(self, region: Region) -> list[tuple[str, str, bytes]]: ...

    def grant(self, region: Region, key: bytes, access: int) -> list[tuple[str, str, bytes]]: ...

    def revoke(self, region: Region, key: bytes, timeout_s: float) -> None: ...

    def close_region(self, region: Region, timeout_s: float, refuse_when_used: bool) -> None: ...

    def add_peer(self, label: str, connection: int, epoch: int, addresses: Sequence[tuple[str, str, bytes]]) -> Peer: ...

    def import_region(self, peer: Peer, name: str, region_id: int, key: bytes, length: int, keys: Sequence[tuple[str, str, bytes]]) -> RemoteRegion: ...

    def next_notice(self, timeout_s: float) -> tuple[str, str, str, str, str, int] | None:
        """
        Kind, peer, rail, region, text and a token: of the held run, or the epoch of the peer.
        """

    def fence_orders(self, epoch: int) -> list[tuple[int, int, str, str, bytes]]:
        """What that peer is to fence now: way, failures, driver, device, token."""

    def fenced(self, epoch: int, orders: Sequence[tuple[int, int, str, str, bytes]]) -> None: ...

    def fence_answered(self, epoch: int, failure: str) -> None:
        """
        Ends what a notice `fence` asked for; without a failure it has been done.
        """

    def fence(self, driver: str, device: str, token: bytes, timeout_s: float) -> None:
        """For a peer: ends what the token names."""

    def enable_driver(self, name: str, enabled: bool) -> None: ...

    def rails(self) -> list[dict[str, object]]: ...

    def stats(self) -> dict[str, dict[str, int]]: ...

class Transfer:
    """A batch of operations: prepared once, posted any number of times."""

    @overload
    def __init__(self, engine: Engine, write: bool, local: Region, remote: RemoteRegion, timeout_s: float, blocks: Annotated[NDArray[numpy.uint64], dict(shape=(None, 3), order='C', device='cpu', writable=False)]) -> None: ...

    @overload
    def __init__(self, engine: Engine, write: bool, local: Region, remote: RemoteRegion, timeout_s: float, length: int, outer: int, local_base: int, local_stride: int, local_outer_stride: int, local_index: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], remote_base: int, remote_stride: int, remote_outer_stride: int, remote_index: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def launch(self, *, priority: str | None = None, deadline_s: float | None = None, notify: tuple[str, bytes] | None = None, stream: int = 0, held: int = 0, drivers: Sequence[str] = (), attempts: int = 0) -> Transfer: ...

    def wait(self, timeout_s: float | None = None) -> None: ...

    def overdue(self, timeout_s: float) -> str:
        """
        What to say of it when it is not done after so long: peer, region and cause.
        """

    def expire(self, limit_s: float) -> None:
        """
        Cancel it, as it was not done within that limit: wait() raises TransferTimeout then.
        """

    def done(self) -> bool: ...

    def cancel(self) -> None: ...

    def signal_when_done(self, event_fd: int) -> None: ...

    def release(self, ticket: int, failure: bytes, error: str) -> None:
        """
        End the held run: well when `failure` is empty, otherwise with that exception of _errors.
        """

    def begin_check(self, ticket: int) -> bool: ...

    def end_check(self, ticket: int) -> None: ...

    def wants_check(self, ticket: int) -> bool: ...

    def call_peer(self, ticket: int, connection: int, method: str, body: bytes, timeout_s: float) -> tuple[bool, bytes]:
        """As Channel.call, but ends early when the held run is cancelled."""

    def blocks_into(self, begin: int, out: Annotated[NDArray[numpy.uint64], dict(shape=(None, 3), order='C', device='cpu')]) -> int: ...

    @property
    def write(self) -> bool: ...

    @property
    def state(self) -> str: ...

    @property
    def blocks(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def bytes_done(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def failure(self) -> str: ...

    @property
    def bytes_by_driver(self) -> dict[str, int]: ...

    @property
    def bytes_by_rail(self) -> dict[str, int]: ...

class DriverAnswer:
    """Somebody who waits for what a driver written in Python says."""

class DriverMailbox:
    """What the engine asks of one endpoint of a driver in Python."""

    def open(self, address: bytes, flags: int, kinds: int, bandwidth: int, latency_ns: int, max_op_bytes: int, alignment: int) -> None: ...

    def take(self, timeout_s: float) -> list[tuple[str, DriverAnswer | None, int, int, int, int, bytes | None, bytes, tuple[int, int, int, int, int, int, int, int] | None, list[tuple[int, int, int, int, int, int, int, int]] | None]]:
        """
        Kind, answer, handle, other handle, number, length, key, blob, memory and operations of each.
        """

    def wake(self) -> None: ...

    def set_late_writes(self, connection: int, token: bytes) -> None:
        """
        What may still carry bytes of a connection's writes that are over; empty: nothing.
        """

    def count_refusal(self) -> None: ...

    def finish(self, rows: Sequence[tuple[int, int, int, int, str]]) -> None:
        """Cookie, bytes, opcode, status and reason of operations."""

    def give(self, answer: DriverAnswer, code: int, reason: str, payload: bytes) -> None: ...

def python_driver(name: str, factory: object, fences: bool) -> CapsuleType:
    """
    The function table of a driver whose endpoints `factory(mailbox, options)` makes.
    """

def compiled_calls(engine: Engine) -> CapsuleType:
    """A capsule with the functions of abi/mooncake_calls.h."""
