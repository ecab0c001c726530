"""
Compiled core of mooncake_store: objects, free space of segments, order of eviction, records, digests.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray
from typing_extensions import CapsuleType


class BestFit:
    """
    Free space of one segment, in pieces of whole granules. Not thread-safe.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int) -> None: ...

    @property
    def granule_bytes(self) -> int: ...

    @property
    def capacity_bytes(self) -> int:
        """Whole granules."""

    @property
    def free_bytes(self) -> int: ...

    @property
    def largest_hole_bytes(self) -> int:
        """The largest value that still fits in one piece."""

    @property
    def live_extents(self) -> dict[int, int]:
        """Start -> bytes taken, of everything allocated and not freed."""

    def rounded(self, nbytes: int) -> int:
        """nbytes rounded up to whole granules: what it takes of the segment."""

    def allocate(self, nbytes: int, max_pieces: int) -> list[tuple[int, int]] | None:
        """
        Room as (offset, bytes) pieces in order, whose bytes add up to nbytes and of which every one but the
        last fills its granules; None when it does not fit in max_pieces. Nothing is taken for 0.
        """

    def free(self, offset: int, nbytes: int) -> None:
        """
        Give back one piece exactly as allocate() returned it. Raises KeyError, ValueError.
        """

class EvictionQueue:
    """
    An EvictionPolicy: clock, lru, arc or gdsf. Not thread-safe.

    What stood in a batch before an id that raises has been done.
    """

    def __init__(self, policy: str) -> None: ...

    def __len__(self) -> int: ...

    def __contains__(self, id: int) -> bool: ...

    def insert(self, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], nbytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Raises ValueError for an id that is there."""

    def touch(self, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Raises KeyError for an id that is not there."""

    def pin(self, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Raises KeyError for an id that is not there."""

    def unpin(self, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Raises KeyError for an id that is not there or not pinned."""

    def remove(self, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Raises KeyError for an id that is not there."""

    def victim(self) -> int | None: ...

class PutOptions:
    """How and where the values of one batch are put."""

    def __init__(self, writer: int, node: int = 0, tenant: int = 0, priority: int = 0, replicas: int = 1, replace: bool = False, hard_pin: bool = False, soft_until_s: float = 0.0, same_node: bool = False, preferred: Sequence[int] = [], avoid: Sequence[int] = [], now_s: float = 0.0, stripes: int = 1) -> None:
        """
        writer: number of a member. preferred, avoid: ids of segments. Raises ValueError for a priority
        over 15, and no replicas or stripes.
        """

    @property
    def group(self) -> str: ...

    @group.setter
    def group(self, arg: str, /) -> None: ...

    @property
    def session(self) -> str: ...

    @session.setter
    def session(self, arg: str, /) -> None: ...

class ObjectMap:
    """
    Objects, the segments they lie in and the order in which they leave. Not thread-safe.
    """

    def __init__(self, granule_bytes: int, evict_reserve_fraction: float, eviction: object, first_version: int = 1) -> None:
        """
        eviction: name of a policy of this package, or what makes an EvictionPolicy. Raises ValueError.
        """

    @property
    def compiled(self) -> bool:
        """Whether the order of eviction is kept without Python."""

    def add_member(self, member: int) -> None:
        """Keep records for a member from now on."""

    def drop_member(self, member: int) -> None: ...

    def add_segment(self, id: int, owner: int, node: int, nbytes: int, confirms: bool) -> None:
        """
        Take in an empty segment of a member. confirms: room of what has gone is used again only when
        its owner has confirmed the record of that. Raises ValueError.
        """

    def drop_segment(self, id: int) -> None:
        """Forget a segment; what has no whole replica elsewhere is gone at once."""

    def open_segment(self, id: int, open: bool) -> None:
        """Whether the segment takes new values."""

    def adopt(self, segment: int, frames: bytes, now_s: float) -> tuple[int, int, int]:
        """
        Take in what its owner's ledger says of a segment that has just been added: how many objects were
        adopted, wait for another owner's word, and were refused, which their owner is told. Raises
        ValueError.
        """

    def end_adoption(self) -> None:
        """Refuse what still waits for another owner's word."""

    def await_ledgers(self) -> None:
        """
        From now on what leaves does not come back by a ledger that tells of it, or of an older version.
        """

    def end_ledgers(self) -> None:
        """Remember no more what has left."""

    def start_above(self, version: int) -> None:
        """Versions to come are above this one."""

    def records(self, member: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """
        What the member has not confirmed: pages of the number of their first frame, and the frames.
        """

    def unread(self, member: int) -> int:
        """How many records the member has not confirmed."""

    def take_rings(self) -> list[int]:
        """
        Members to be told now that records wait for them, each once until it has been handed them.
        """

    def confirm(self, member: int, seen: int) -> None:
        """The member has all records up to this number."""

    def segment_room(self, id: int) -> list[int]:
        """
        Bytes of one segment: capacity, free, largest hole, evictable, leased, reserved, kept, retiring,
        and what the values in what is taken have. Raises KeyError.
        """

    def room(self) -> tuple[int, int, int, int, int, int, int]:
        """Capacity, free, evictable, leased, reserved, kept and retiring bytes."""

    @property
    def segments(self) -> int: ...

    def exist(self, digests: bytes) -> bytes:
        """One byte per digest, 0 or 1."""

    def sizes(self, digests: bytes) -> bytes:
        """uint64 each; 2**64 - 1 for what is not there."""

    def own(self, digests: bytes, tenant: int) -> bytes:
        """
        The digests, but zeros in place of those whose objects are another tenant's.
        """

    def locate(self, digests: bytes, reader: int, node: int) -> tuple[bytes, bytes, bytes, list[bytes], list[int]]:
        """
        Begin a lease of each that is there, as a use. Found (one byte each), sizes (uint64 each), slots of
        those found (uint32), rows (see protocol.Placement) of the nearest replica of each and then of
        those further away, and the ids of the segments in the rows.
        """

    def release(self, slots: bytes) -> list[int]:
        """End a lease of each; the positions of those that are broken."""

    def reserve(self, digests: bytes, sizes: bytes, put: PutOptions) -> tuple[bytes, bytes, bytes, list[int], bool]:
        """
        Find or make room. Outcomes (one byte each), slots of those placed (uint32), rows, ids of the
        segments in them, and whether waiting may help those that are full.
        """

    def commit(self, slots: bytes, failed: Sequence[int], keys: list[bytes], replace: bool, now_s: float) -> bytes:
        """
        Make reserved slots findable. Outcomes, one byte each; those at the positions `failed` stay
        reserved. Raises ValueError for slots that are not reserved.
        """

    def abandon(self, slots: bytes) -> None:
        """
        Give back reserved room, to which nobody writes any more. Raises ValueError.
        """

    def remove(self, digests: bytes) -> bytes:
        """Hide what is there. One byte per digest, 0 or 1."""

    def remove_tenant(self, tenant: int) -> int:
        """Hide all that a tenant has; how many that was."""

    def pin(self, digests: bytes, hard: bool, soft_until_s: float, now_s: float) -> bytes:
        """
        Pin what is there, for good or until a time. One byte per digest, 0 or 1.
        """

    def unpin(self, digests: bytes) -> bytes:
        """One byte per digest, 0 or 1."""

    def end_session(self, tenant: int, session: str) -> int:
        """Let the session's objects go first; how many there are."""

    def expire_pins(self, now_s: float) -> None: ...

    def tenant(self, name: str) -> int:
        """Number of a tenant."""

    def limit_tenant(self, tenant: int, quota_bytes: int, evicts_own: bool) -> None: ...

    def tenants(self) -> list[tuple[str, int, int]]:
        """Name, bytes taken and quota (0: none) of each tenant."""

    def tenant_bytes(self, tenant: int) -> int:
        """What the tenant's values take, with all replicas."""

    def __len__(self) -> int: ...

    def counts(self) -> tuple[int, int, int, int]:
        """Stored, evicted, removed and lost objects."""

    def describe(self) -> list[tuple[int, bytes, int, str, int, bool, int, list[tuple[int, int, int, int]]]]:
        """
        Everything, for tests: version, digest, bytes, state, leases, whether it is broken, level of
        eviction, and extents (segment, offset, bytes, replica) in segments that are there.
        """

    def set_sums(self, slots: bytes, sums: bytes) -> None:
        """
        What the checksums (uint64) of the values of reserved slots are. Raises ValueError.
        """

    def sums(self, slots: bytes) -> bytes:
        """Checksums (uint64), 0 for those not known. Raises ValueError."""

    def condemn(self, at: int, segment: int) -> bool:
        """
        What a leased slot has in this segment is not what was put: the replica leaves, or the object does
        with its last. False when it was not there any more. Raises ValueError.
        """

    def copy_begin(self, at: int, version: int, mover: int, target: int = 0, leaving: int = 0, evicts: bool = False, bounded: bool = False, avoid: Sequence[int] = ()) -> tuple[int, int, int, bytes, bytes, list[int]]:
        """
        Begin one more replica: outcome (see protocol.CopyOutcome), slot of its room, bytes, rows of the
        source and of the room, and ids of the segments in them. target, leaving: ids of segments, or 0;
        avoid: of those that take it when no other may. Raises ValueError.
        """

    def copy_end(self, slot: int, key: bytes, now_s: float) -> int:
        """
        All bytes are in the room, and nobody writes there any more: what became of the copy. Raises
        ValueError.
        """

    def copy_give_up(self, slot: int) -> None:
        """
        Nobody reads the source for this copy any more; its room is taken until it is abandoned.
        """

    def want(self, digests: bytes, replicas: int) -> bytes:
        """
        So many replicas are wanted from now on; those beyond leave. One byte per digest, 0 or 1.
        """

    def take_mending(self, most: int) -> list[tuple[int, int, int]]:
        """
        Slot and version of objects with fewer replicas than wanted, and the number of who may make one;
        each once until mended().
        """

    def mended(self, at: int, version: int) -> None:
        """Something was tried; if it was not enough, it is to be tried again."""

    @property
    def to_mend(self) -> int: ...

    @property
    def corrupt(self) -> int: ...

    @property
    def copied(self) -> int: ...

    def whereabouts(self, digests: bytes) -> list[tuple[int, int, int, int, list[int]]]:
        """
        Of each digest its slot (2**32 - 1: not there), version, number of an owner, how many whole
        replicas it has, and ids of the segments they lie in.
        """

    def lying_in(self, segment: int, start: int, most_slots: int, most_bytes: int) -> tuple[list[tuple[int, int]], int, int, int, int, int]:
        """
        Go through what lies in a segment that is to become empty: slots and versions of what has to be
        copied elsewhere, where to go on (2**32 - 1: this was all), and how many are copied but still
        read here, copied but not known to their owners yet, being put here, being copied now. What is
        elsewhere, too, leaves.
        """

    def relinquish(self, at: int, version: int, segment: int) -> bool:
        """
        Let an object leave a segment if a replica of it stays elsewhere; whether that is so.
        """

    def lies_in(self, slots: bytes, segment: int) -> bool:
        """
        Whether one of these leased or reserved slots has bytes there. Raises ValueError.
        """

    def digests_of(self, slots: bytes) -> bytes:
        """What these leased or reserved slots are for. Raises ValueError."""

    def segments_of(self, slots: bytes) -> list[int]:
        """
        In which segments these leased or reserved slots have bytes. Raises ValueError.
        """

class Ledger:
    """What an owner knows of the values in its segment. Not thread-safe."""

    def __init__(self) -> None: ...

    def take(self, first: int, frames: bytes) -> list[tuple[bytes, bytes, str]]:
        """
        Take a page of records. Digest, key (empty when it is not known here) and tenant of what its
        user is to be told has gone. Raises ValueError for bytes that are no records.
        """

    def restart(self, keep: bool) -> None:
        """A new master counts from 1; keep what is held, or not."""

    @property
    def seen(self) -> int:
        """Number of the last record taken."""

    @property
    def last_version(self) -> int:
        """The highest version that ever stood here."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory that the records take."""

    def find(self, version: int) -> bytes | None:
        """The record of a version, as a frame; None when there is none."""

    def part(self, number: int) -> bytes | None:
        """
        The standing records of one part, about 1 MiB of frames; None beyond the last part. What comes or
        goes meanwhile may be missed or come twice; what stands throughout is not missed.
        """

def read_records(frames: bytes) -> list[tuple[int, int, int, bytes, bytes, int, str, str, int, float, list[tuple[int, int, int, int]]]]:
    """
    Kind (1: stored, 2: gone, 3: changed), flags (1: to be told, 2: pinned), version, digest, key, bytes,
    tenant, group, priority, seconds of the soft pin, and extents (segment, offset, bytes, replica) of each
    frame. Raises ValueError.
    """

def tenant_keys(frames: bytes, tenant: str, begin: bytes) -> list[tuple[bytes, int]]:
    """
    Key and bytes of each record of a tenant whose key begins so. Raises ValueError.
    """

def value_sums(address: int, nbytes: int, offsets: bytes, sizes: bytes) -> bytes:
    """
    Checksums (uint64) of values in memory, given by offset and size (uint64); see core/digests.hpp.
    """

def key_digests(prefix: bytes, keys: list[str | bytes]) -> bytes:
    """
    xxh3-128 of the prefix and each key (text is UTF-8): 16 bytes each. Raises ValueError for a key that is
    empty, longer than 64 KiB or of another type.
    """

class TierRecords:
    """What lies in tiers, as far as a master knows. Not thread-safe."""

    def __init__(self) -> None: ...

    def enter(self, digest: bytes, where: tuple[int, int, int, int], tenant: str | None, round: int) -> None:
        """
        A record (tier, epoch, version, bytes) is there, and was named in this round of its tier, which has
        no other of that key. tenant: None when nobody knows. Raises ValueError.
        """

    def name(self, digest: bytes, where: tuple[int, int, int, int], round: int) -> bool:
        """
        Whether exactly this one is there; from now on as one that was named in this round.
        """

    def forget(self, digest: bytes) -> list[tuple[int, int, int, int]]:
        """All of a key go; what that was."""

    def lose(self, digest: bytes, tier: int, epoch: int, version: int) -> bool:
        """One goes, of whatever size; whether it was there."""

    def purge(self, tier: int, round: int, first: int = 0, most: int = 4294967295) -> tuple[int, int | None]:
        """
        Go through so many places: what is of this tier, and was not named in this round, goes. How many,
        and where to go on; None: this was all.
        """

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory that they take."""

    def __contains__(self, arg: bytes, /) -> bool: ...

    def find(self, digest: bytes) -> list[tuple[int, int, int, int]]:
        """
        Those of a key as (tier, epoch, version, bytes), by number of the tier.
        """

    def count(self, tier: int) -> tuple[int, int]:
        """Records of a tier, and bytes of their values."""

    def reachable(self, digests: bytes, tiers: Sequence[int]) -> bytes:
        """One byte per digest: whether one of these tiers has it."""

    def rows(self, digests: bytes, skip: bytes, tiers: Sequence[int]) -> bytes:
        """
        Rows of position, tier, epoch, version, bytes: for each digest of which skip says 0, the record in
        the first of these tiers that has one.
        """

    def own(self, digests: bytes, tenant: str) -> bytes:
        """
        The digests, but zeros in place of those that are known here, and not as this tenant's.
        """

    def of_tenant(self, tenant: str) -> bytes:
        """Digests of what is this tenant's, or may be."""

def lay_out(rows: bytes, offsets: NDArray[numpy.uint64]) -> list[tuple[int, NDArray[numpy.uint64]]]:
    """
    For each segment its number and its blocks: N x 3 of local offset, offset in the segment, bytes.

    rows: of a placement (protocol.Placement). offsets: where the value at each position begins locally.
    Pieces that follow each other on both sides are one block. Raises ValueError.
    """

class Grant:
    """
    What a client was promised about some objects, in the order it named them.
    """

    @property
    def id(self) -> int: ...

    @property
    def client(self) -> int: ...

    @property
    def deadline_s(self) -> float: ...

    @property
    def slots(self) -> bytes:
        """Of the objects in the map, uint32 each."""

    @property
    def keys(self) -> list[bytes]:
        """Of a reservation: the texts of the keys."""

class GrantTable:
    """
    Grants of one kind, which all live equally long unless renewed. Not thread-safe; times are the
    caller's.
    """

    def __init__(self, ttl_s: float) -> None: ...

    def __len__(self) -> int: ...

    def grant(self, client: int, slots: bytes, now_s: float, keys: list[bytes] = ...) -> Grant:
        """Promise something anew. Ids are never used again."""

    def renew(self, id: int, client: int, now_s: float) -> bool:
        """
        Let a grant of the client live for another full time; False when it has none of this id.
        """

    def __contains__(self, id: int) -> bool: ...

    def slots_of(self, id: int, client: int) -> bytes:
        """The slots of a grant of the client; none when it has none of this id."""

    def take(self, id: int, client: int) -> Grant | None:
        """
        End a grant of the client and return it; None when it has none of this id.
        """

    def take_all(self, client: int) -> list[Grant]:
        """End every grant of a client."""

    def take_expired(self, now_s: float) -> list[Grant]:
        """End the grants whose deadline has passed."""

    @property
    def newest(self) -> int:
        """Id of the last grant; later ones have higher ids."""

    def all(self) -> list[Grant]:
        """Every grant that has not ended."""

    def slots_until(self, newest: int) -> list[bytes]:
        """
        The slots of each grant that was given no later than that of this id, and has not ended.
        """

    @property
    def first_deadline_s(self) -> float | None:
        """When the next grant expires; None when there is none."""

class DeskLock:
    """Held, as a context manager, by who touches a master's state."""

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        """
        Give it up until somebody notifies or the time is over; True in the first case. Raises
        RuntimeError when this thread does not hold it.
        """

    def notify(self) -> None:
        """
        Wake up who waits. Raises RuntimeError when this thread does not hold it.
        """

class Tenure:
    """
    A leadership: until when nobody else can lead, as the candidate has last heard.
    """

    def __init__(self) -> None: ...

    def last(self, until_s: float) -> None:
        """Of CLOCK_BOOTTIME; 0: it is over."""

    def held(self) -> bool: ...

class Desk:
    """
    Answers the usual requests of members without the interpreter. All calls: with its lock held,
    once it is at a port.
    """

    def __init__(self, map: ObjectMap, leases: GrantTable, reservations: GrantTable, epoch: int, most_record_bytes: int) -> None: ...

    @property
    def lock(self) -> DeskLock: ...

    def close(self) -> None:
        """From now on everything goes the other way."""

    @property
    def is_open(self) -> bool: ...

    def lead(self, tenure: Tenure) -> None:
        """From now on nobody is answered but in this leadership."""

    def note_touches(self) -> None:
        """
        There are tiers: from now on only what lies in memory is read here, and take_touches tells of it.
        """

    def take_touches(self) -> list[tuple[bytes, int]]:
        """
        Digests read since the last call, each with the segment of its first byte.
        """

    def admit(self, client: int, connection: int, number: int, node: int, tenant: int, express: bool, own_prefix: bytes) -> None:
        """
        A member has joined. express: it may be answered here. own_prefix: not empty for who sees objects
        of its tenant only; what goes before keys in what their digests are made of.
        """

    def drop(self, client: int) -> None: ...

    def heard_s(self, client: int) -> float:
        """When a member was last answered here; 0: never."""

    def describe(self, segment: int, descriptor: bytes) -> None: ...

    def forget(self, segment: int) -> None: ...

    def count(self, tenant: int, hits: int, misses: int) -> None:
        """Keys were looked for, to be read."""

    def reads(self) -> list[tuple[int, int]]:
        """Hits and misses of each tenant, by its number."""

    def take_samples(self) -> list[tuple[bytes, int]]:
        """
        Digests of some of what was read since the last call, and for how many reads each stands.
        """

    def take_calls(self) -> list[tuple[str, int, float, list[int]]]:
        """
        Name, number, seconds and telemetry's buckets of the requests answered here since the last call.
        """

    def take_rings(self) -> list[int]:
        """Members to be told that records wait; see ObjectMap."""

class DeskPort:
    """Where an engine's channel finds the desk of the master that it serves."""

    def __init__(self) -> None: ...

    def handler(self) -> CapsuleType:
        """What TransferEngine.serve_compiled takes."""

    def attach(self, desk: Desk) -> None:
        """Keep the desk until it is detached."""

    def detach(self) -> None:
        """Nobody is answered any more when this returns."""

def express_ask(kind: int, epoch: int, client: int, digests: bytes = b'', ended: Sequence[int] = ..., id: int = 0, seen: int = 0, replace: bool = False, sizes: bytes = b'', keys: list[bytes] = ..., summed: bool = False, sums: bytes = b'') -> bytes:
    """
    A request as core/express.hpp lays it out; kind is a number of Express there.
    """

def express_answer(answer: bytes) -> Any:
    """
    What an answer says; None when it has to be asked the other way. Raises ValueError.

    Locate: lease, found, sizes, rows of each replica, descriptors, sums. Exist: found. Release: expired, broken.
    Reserve: reservation, outcomes, rows, descriptors, room or None, wait. Commit: outcomes, pages of
    records.
    """

class Quick:
    """
    The usual get and put of one value, without the interpreter. Thread-safe.

    A call returns what the client's does, None when it has done nothing, or else how far it
    has come, as quick.Handed.
    """

    def __init__(self, calls: object, method: str, prefix: bytes, wake: Callable[[], None], call_timeout_s: float, transfer_timeout_s: float, sums: bool) -> None: ...

    def join(self, connection: int, epoch: int, client: int, lease_ttl_s: float, reservation_ttl_s: float, joined_s: float) -> None:
        """
        The client is a member of the master at the other end of the connection, since joined_s.
        """

    @property
    def joined(self) -> bool: ...

    def leave(self) -> None:
        """It is not any more."""

    def know(self, segment: int, descriptor: bytes, remote: object, checked: bool) -> None:
        """
        The segment of this descriptor is reached as this RemoteRegion; what comes from there is `checked`.
        """

    def forget(self, segment: int) -> None: ...

    def keep_only(self, segments: Sequence[int], asked_s: float) -> None:
        """As Mover.keep_only."""

    def end(self, lease: int) -> None:
        """The next question tells the master that this lease has ended."""

    def take_ended(self) -> list[int]:
        """
        Leases that have ended and that the master was not told of; that is the caller's now.
        """

    def ended_for_s(self) -> float:
        """For how long the oldest of them has waited; 0 when there are none."""

    def leases(self) -> list[int]:
        """Those under which something is being read."""

    def idle(self) -> None:
        """Call `wake` when the next lease ends."""

    def take_counts(self) -> tuple[list[tuple[str, int, int, float, list[int]]], tuple[int, int, int, int, int]]:
        """
        Name, number, failures, seconds and telemetry's buckets of calls, then hits, misses, bytes read,
        values stored, bytes written; all since the last call.
        """

    def get_into(self, key: object, region: object, offset: object, nbytes: object) -> Any: ...

    def get(self, key: object, staging: object) -> Any: ...

    def put_from(self, key: object, region: object, offset: object, nbytes: object, replace: bool, seen_epoch: int, seen: int) -> Any: ...
