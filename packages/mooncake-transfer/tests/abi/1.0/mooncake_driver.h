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
 * background, and operations that depend on it wait inside the driver. The two calls that may wait say so and
 * take a deadline.
 *  - Deadlines are absolute CLOCK_MONOTONIC nanoseconds.
 *  - After a call that failed, last_error() on the same thread tells why, in a sentence for people.
 *
 * Versions: abi_major must be equal. Within a major, structs only grow at their end; both sides compare
 * struct_size (or abi_minor) before they touch a later member.
 */
#ifndef MOONCAKE_DRIVER_H
#define MOONCAKE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MC_ABI_MAJOR 1u
#define MC_ABI_MINOR 0u
#define MC_DRIVER_CAPSULE "mooncake.driver.v1"
#define MC_KEY_BYTES 16   /* access key of a region: random, new for each registration */
#define MC_BLOB_MAX 1024  /* largest address or key blob a driver may export */
#define MC_REASON_MAX 200 /* longest reason, including the final zero */

typedef uint64_t mc_handle;

typedef enum mc_status {
  MC_OK = 0,
  MC_AGAIN = 1,       /* the queue is full, or completions are waiting: poll, then call again */
  MC_INVALID = 2,     /* an argument is wrong: the caller's mistake */
  MC_UNSUPPORTED = 3, /* this driver cannot do it; another one may */
  MC_NO_MEMORY = 4,
  MC_UNREACHABLE = 5, /* the peer does not answer or has gone away; the operation may or may not have been
                         applied, but as for MC_CANCELLED: never after a later one */
  MC_REFUSED = 6,     /* the target refused: unknown region, wrong key, or outside the region */
  MC_CANCELLED = 7,   /* bytes of a write may land late: the driver orders or fences them, so that none lands
                         after a later write of the same connection was reported as MC_OK */
  MC_TIMEOUT = 8,
  MC_IO = 9,     /* the operating system or the device reported an error */
  MC_CLOSED = 10 /* the endpoint or connection is closed on this side */
} mc_status;

typedef enum mc_memory_kind { MC_DRAM = 0, MC_CUDA = 1, MC_FILE = 2, MC_BLOCK = 3 } mc_memory_kind;

typedef enum mc_opcode {
  MC_READ = 0, /* remote memory -> local memory */
  MC_WRITE = 1 /* local memory -> remote memory; done when the bytes are visible at the target */
} mc_opcode;

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
  uint64_t region_id; /* unique within this engine, never used again */
  uint8_t key[MC_KEY_BYTES];
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

typedef struct mc_caps {
  uint32_t struct_size;           /* set by the caller */
  uint32_t flags;                 /* MC_CAP_* */
  uint64_t memory_kinds;          /* bit 1 << mc_memory_kind for each kind register_memory takes */
  uint64_t bandwidth_bytes_per_s; /* expected, for ranking rails */
  uint64_t latency_ns;            /* expected, of one small operation */
  uint64_t max_op_bytes;          /* 0: no limit */
  uint32_t alignment;             /* of offsets and lengths, 1: none */
  uint32_t reserved;
} mc_caps;

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
   * timer. arm() returns MC_AGAIN when completions are waiting already. The engine never reads the
   * descriptor. */
  int (*event_fd)(mc_handle endpoint);
  mc_status (*arm)(mc_handle endpoint);
  /* Asks for an early end of the operations with this cookie. Each still completes: MC_CANCELLED, or its own
   * result. */
  mc_status (*cancel)(mc_handle endpoint, uint64_t cookie);
};

#ifdef __cplusplus
}
#endif
#endif
