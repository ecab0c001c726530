/*
 * mooncake_driver.h - the C ABI between the transfer engine and its drivers, version 1.
 *
 * A driver moves bytes between memory of this process and memory of a peer. It hands the engine one
 * `struct mc_driver_v1`, wrapped in a PyCapsule named MC_DRIVER_CAPSULE; from then on the engine calls the
 * functions of that table directly, without Python. Plain data only: no C++ types, no exceptions, handles are
 * opaque and never 0.
 *
 * Rules that hold for every function
 *  - It returns an mc_status and writes its outputs only when that is MC_OK (submit: also when MC_AGAIN).
 *  - It may be called from any thread, also at the same time as others on the same endpoint, except that a
 * handle is never used during or after the call that gives it back.
 *  - It never blocks on a peer. What needs a round trip (connecting, checking a key) starts in the
 * background, and operations that depend on it wait inside the driver. The calls that may wait say so and
 * take a deadline.
 *  - Deadlines are absolute CLOCK_MONOTONIC nanoseconds.
 *  - After a call that failed, last_error() on the same thread tells why, in a sentence for people.
 *  - A connection outlives its sockets or queue pairs: when they are lost, operations in flight end with
 * MC_UNREACHABLE, and the next operation submitted makes the driver try to connect anew. A peer that was
 * restarted at the same address refuses old keys (MC_REFUSED) or is MC_UNREACHABLE; it is never written to.
 *
 * Late writes
 *  A write that completes with MC_OK is visible at the target. One that completes with anything else is over
 * for the initiator, but what it put on its way may reach the target's memory yet. Two rules keep such bytes
 * off those of later writes:
 *  - Within a connection the driver sees to it: none lands after a later write of the same connection was
 * reported as MC_OK.
 *  - Across connections (other endpoints, other drivers) the engine does, with late_writes() and fence(). As
 * long as late_writes() names something for a connection, the engine gives no write to another connection
 * that leads to the same peer. When that lasts, it carries the token to the peer's engine, which calls
 * fence() of the endpoint that the connection leads to, and goes on once that says MC_OK. Where both
 * functions are NULL the driver promises that nothing of a write lands once its completion is out, whatever
 * its status: so it is where threads of the initiator do the copying. No driver has just one.
 *
 * Versions: abi_major must be equal. Within a major, structs only grow at their end; both sides compare
 * struct_size (or abi_minor) before they touch a later member. Members marked 1.1 or 1.2 came with that
 * minor.
 */
#ifndef MOONCAKE_DRIVER_H
#define MOONCAKE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MC_ABI_MAJOR 1u
#define MC_ABI_MINOR 2u
#define MC_DRIVER_CAPSULE "mooncake.driver.v1"
#define MC_KEY_BYTES 16   /* access key of a region: random, new for each registration */
#define MC_BLOB_MAX 1024  /* largest address or key blob a driver may export */
#define MC_REASON_MAX 200 /* longest reason, including the final zero */
#define MC_NOTICE_MAX 512 /* longest notice a driver may announce in its caps */

typedef uint64_t mc_handle;

typedef enum mc_status {
  MC_OK = 0,
  MC_AGAIN = 1,       /* the queue is full, or completions are waiting: poll, then call again */
  MC_INVALID = 2,     /* an argument is wrong: the caller's mistake */
  MC_UNSUPPORTED = 3, /* this driver cannot do it; another one may */
  MC_NO_MEMORY = 4,
  MC_UNREACHABLE = 5, /* the peer does not answer or has gone away; the operation may or may not have been
                         applied, or may be yet: see "Late writes" */
  MC_REFUSED = 6,     /* the target refused: unknown region, wrong key, or outside the region */
  MC_CANCELLED = 7,   /* bytes of a write may land yet: see "Late writes" */
  MC_TIMEOUT = 8,
  MC_IO = 9,     /* the operating system or the device reported an error */
  MC_CLOSED = 10 /* the endpoint or connection is closed on this side */
} mc_status;

typedef enum mc_memory_kind { MC_DRAM = 0, MC_CUDA = 1, MC_FILE = 2, MC_BLOCK = 3 } mc_memory_kind;

typedef enum mc_opcode {
  MC_READ = 0, /* remote memory -> local memory */
  MC_WRITE = 1 /* local memory -> remote memory; done when the bytes are visible at the target */
} mc_opcode;

/* What a key allows a peer to do. */
typedef enum mc_access { MC_ACCESS_READ = 1, MC_ACCESS_WRITE = 2 } mc_access;

/* One option as the driver's Python plugin validated it. */
typedef struct mc_option {
  const char* name;
  const char* value;
} mc_option;

/* Memory to register. `fd` is a shareable descriptor (memfd, DMA-BUF) behind `address`, or -1. The driver
 * duplicates it. */
typedef struct mc_memory {
  uint32_t struct_size;
  uint32_t kind; /* mc_memory_kind */
  int32_t device;
  int32_t fd;
  uint64_t fd_offset;
  uint64_t address;
  uint64_t length;
  uint64_t region_id;        /* unique within this engine, never used again */
  uint8_t key[MC_KEY_BYTES]; /* allows reading and writing; grant() makes lesser keys */
  int32_t numa_node;         /* 1.1: where the memory lies, -1 when unknown */
  uint32_t reserved;         /* 1.1: 0 */
  const char* location; /* 1.2: of MC_BLOCK: a URL by which the driver itself reaches the device, which then
                           has no fd; fd_offset counts from its beginning. NULL: there is none */
} mc_memory;

/* One operation. `cookie` comes back in the completion. The ranges lie inside the local memory and, as far as
 * the initiator knows, inside the remote one; the target checks again. length is never 0 and may be of any
 * size. */
typedef struct mc_op {
  uint32_t opcode; /* mc_opcode */
  uint32_t flags;  /* 0 */
  mc_handle connection;
  mc_handle local;
  mc_handle remote;
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t length;
  uint64_t cookie;
} mc_op;

/* Once a completion is out, the driver no longer touches the operation's local memory, whatever its status.
 */
typedef struct mc_completion {
  uint64_t cookie;
  uint64_t bytes;             /* moved; equal to the length when status is MC_OK */
  int32_t status;             /* mc_status */
  char reason[MC_REASON_MAX]; /* empty when status is MC_OK */
} mc_completion;

#define MC_CAP_SAME_HOST_ONLY 1u /* connect() to another machine fails with MC_UNREACHABLE */
#define MC_CAP_STREAM 2u         /* 1.1: submit_on_stream works */

typedef struct mc_caps {
  uint32_t struct_size;           /* set by the caller */
  uint32_t flags;                 /* MC_CAP_* */
  uint64_t memory_kinds;          /* bit 1 << mc_memory_kind for each kind register_memory takes */
  uint64_t bandwidth_bytes_per_s; /* expected, for ranking rails */
  uint64_t latency_ns;            /* expected, of one small operation */
  uint64_t max_op_bytes;          /* 0: no limit */
  uint32_t alignment;             /* of offsets and lengths, 1: none */
  uint32_t reserved;
  uint64_t
      inline_bytes; /* 1.1: an operation of at most so many bytes may complete inside submit(); 0: none */
  uint64_t in_flight_bytes; /* 1.1: how much to keep in flight on one connection; 0: the engine's default */
  uint64_t in_flight_ops;   /* 1.1: how many operations; 0: the engine's default */
  uint64_t notice_bytes;    /* 1.2: longest notice, at most MC_NOTICE_MAX; 0: there are none */
} mc_caps;

/* 1.2: what notify() of a peer has sent here. */
typedef struct mc_notice {
  uint32_t length;
  uint32_t reserved; /* 0 */
  uint8_t data[MC_NOTICE_MAX];
} mc_notice;

typedef struct mc_stats {
  uint32_t struct_size; /* set by the caller */
  uint32_t connections; /* open now, made by this side */
  uint64_t ops;         /* completed, this side as initiator */
  uint64_t bytes_read;
  uint64_t bytes_written;
  uint64_t errors;  /* completions that were not MC_OK */
  uint64_t refused; /* requests of peers that this side refused */
} mc_stats;

struct mc_driver_v1 {
  uint32_t abi_major;
  uint32_t abi_minor;
  size_t struct_size;
  const char* name; /* as in the plugin's DriverInfo */

  /* An endpoint is one instance of the driver in one engine: its threads, listeners and tables. */
  mc_status (*open)(const mc_option* options, size_t count, mc_handle* endpoint);
  /* Ends every operation (MC_CLOSED), joins every thread, frees everything. Completions not polled are lost.
   */
  void (*close)(mc_handle endpoint);
  mc_status (*caps)(mc_handle endpoint, mc_caps* caps);
  mc_status (*stats)(mc_handle endpoint, mc_stats* stats);
  const char* (*last_error)(void);

  /* What a peer needs to connect to this endpoint. `*length` is the capacity on entry, the size on return. */
  mc_status (*export_address)(mc_handle endpoint, void* blob, size_t* length);
  /* Begins a connection to a peer's endpoint. Needs no answer: an unreachable peer shows in the completions.
   */
  mc_status (*connect)(mc_handle endpoint, const void* address, size_t length, mc_handle* connection);
  /* Ends the connection's operations (MC_CLOSED, delivered by poll) and frees it. */
  void (*disconnect)(mc_handle endpoint, mc_handle connection);

  mc_status (*register_memory)(mc_handle endpoint, const mc_memory* memory, mc_handle* registered);
  /* Refuses new operations on it at once, then waits until no peer touches it any more, at most until the
   * deadline (MC_TIMEOUT: it stays revoked and the caller may call again). The engine has none of its own
   * operations on it then. */
  mc_status (*deregister_memory)(mc_handle endpoint, mc_handle registered, uint64_t deadline_ns);
  /* What a peer's import_key needs beside the region id and access key, which travel with it. May be empty.
   */
  mc_status (*export_key)(mc_handle endpoint, mc_handle registered, void* blob, size_t* length);

  /* Names a peer's region. Only stores what is given: a wrong key shows as MC_REFUSED in the completions. */
  mc_status (*import_key)(mc_handle endpoint, mc_handle connection, uint64_t region_id,
                          const uint8_t key[MC_KEY_BYTES], uint64_t region_length, const void* blob,
                          size_t length, mc_handle* remote);
  void (*release_key)(mc_handle endpoint, mc_handle remote);

  /* Takes the first `*accepted` of `count` operations; MC_AGAIN when not all. Every one taken completes
   * exactly once. */
  mc_status (*submit)(mc_handle endpoint, const mc_op* ops, size_t count, size_t* accepted);
  /* Fetches up to `capacity` completions; MC_OK with `*count` 0 when there is none. */
  mc_status (*poll)(mc_handle endpoint, mc_completion* completions, size_t capacity, size_t* count);
  /* A descriptor that becomes readable when completions arrive after arm() returned MC_OK; -1: poll on a
   * timer. arm() returns MC_AGAIN when completions are waiting already, or when poll() could do some of the
   * work, which a driver may leave to whoever polls. The engine never reads the descriptor. */
  int (*event_fd)(mc_handle endpoint);
  mc_status (*arm)(mc_handle endpoint);
  /* Asks for an early end of the operations with this cookie. Each still completes: MC_CANCELLED, or its own
   * result. */
  mc_status (*cancel)(mc_handle endpoint, uint64_t cookie);

  /* ---- 1.1; NULL where the driver cannot do it */

  /* Adds a key with lesser rights (mc_access bits) to registered memory and fills what export_key would for
   * it.
   */
  mc_status (*grant)(mc_handle endpoint, mc_handle registered, const uint8_t key[MC_KEY_BYTES],
                     uint32_t access, void* blob, size_t* length);
  /* Refuses new operations of peers under this key at once (NULL: under every key; the memory's own
   * operations as the local side go on), then waits until none is running, at most until the deadline
   * (MC_TIMEOUT: it stays revoked). A deadline of 0 does not wait and returns MC_OK. MC_INVALID for a key
   * that was never granted. */
  mc_status (*revoke)(mc_handle endpoint, mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  /* As submit, in the order of a device stream (a CUstream, an aclrtStream): operations start when the work
   * queued before them is done, and work queued after them starts when they are. */
  mc_status (*submit_on_stream)(mc_handle endpoint, void* stream, const mc_op* ops, size_t count,
                                size_t* accepted);

  /* ---- 1.2; see "Late writes"; both NULL where nothing of a write lands once its completion is out */

  /* At the initiator: what may still carry bytes of writes of this connection whose completions are out, as a
   * token for the peer's fence(). `*length` is the capacity on entry (MC_BLOB_MAX), the size on return; 0:
   * nothing of them can land any more. Cheap, and never waits: the engine asks again and again while other
   * writes are held up. What was under way when fence() took the token away fails like any operation of a
   * broken connection (MC_UNREACHABLE). */
  mc_status (*late_writes)(mc_handle endpoint, mc_handle connection, void* token, size_t* length);
  /* At the target: ends what the token names (sessions, queue pairs; where nothing else stops a one-sided
   * write, the endpoint or the keys it uses), and returns MC_OK once nothing of it can be applied any more,
   * now or later; waits at most until the deadline (MC_TIMEOUT: it may not be so, and the call may be
   * repeated). What the token names may be gone already, or was never there: then it is MC_OK at once. The
   * initiator may have disconnected meanwhile. New connections of the same peer work, also while the call
   * waits. The token comes from the network: MC_INVALID when it is malformed. */
  mc_status (*fence)(mc_handle endpoint, const void* token, size_t length, uint64_t deadline_ns);

  /* ---- 1.2; both NULL, and caps.notice_bytes 0, where the hardware has no messages of its own */

  /* Sends `length` bytes (1 to caps.notice_bytes) to the peer's endpoint, to be fetched there by
   * poll_notices() once the bytes of every write of this connection that was accepted before it are visible,
   * also where the fabric reorders (the driver counts, or waits). Copies the data. If one of those writes
   * fails, the notice is not delivered and fails too. It completes like an operation, with 0 bytes: MC_OK
   * when it was delivered, once; anything else: it may or may not have been. MC_AGAIN as for submit(). */
  mc_status (*notify)(mc_handle endpoint, mc_handle connection, const void* data, size_t length,
                      uint64_t cookie);
  /* Fetches up to `capacity` notices of peers, which come in no order; MC_OK with `*count` 0 when there is
   * none. They wait in the driver until they are fetched, as many as it has room for; beyond that the
   * senders' notices wait or fail, but none is lost that completed with MC_OK. event_fd() becomes readable
   * for them as for completions, and arm() returns MC_AGAIN while some wait. */
  mc_status (*poll_notices)(mc_handle endpoint, mc_notice* notices, size_t capacity, size_t* count);
};

#ifdef __cplusplus
}
#endif
#endif
