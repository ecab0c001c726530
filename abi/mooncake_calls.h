/* How compiled code of other packages asks peers and moves bytes by an engine of this process, without the
 * interpreter: TransferEngine.compiled_calls() gives a PyCapsule named MC_CALLS_CAPSULE with one of these.
 * Plain C, no exceptions across it. Later minor versions only add fields at the end.
 *
 * Every function may be called by several threads at the same time. Those marked (py) need the interpreter's
 * lock, those that wait must not have it: they take it ten times a second to look for Ctrl-C, and after that
 * leave its exception set.
 *
 * `failure`: where a function says so, it gets something for raise(), which has to be called once with it.
 * Nothing is left behind then. */
#ifndef MOONCAKE_CALLS_H
#define MOONCAKE_CALLS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MC_CALLS_CAPSULE "mooncake.calls.v1"
#define MC_CALLS_ABI_MAJOR 1u
#define MC_CALLS_ABI_MINOR 0u

enum mc_call_result {
  MC_CALL_DONE = 0,
  MC_CALL_FAILED = 1,      /* and `failure` is set */
  MC_CALL_REFUSED = 2,     /* the peer's handler raised something, or there is none; Peer.call says what */
  MC_CALL_INTERRUPTED = 3, /* an exception is set */
};

struct mc_calls_v1 {
  uint32_t abi_major, abi_minor;
  size_t struct_size;
  void* context; /* the first argument of most */

  /* (py) What moves name a region by, of this engine or of a peer: from a Region or RemoteRegion. Null for
   * another object, for a closed region, and for one of another engine. Kept until drop_*(), which need no
   * lock. */
  void* (*keep_region)(void* context, void* object);
  void* (*keep_remote)(void* context, void* object);
  void (*drop_region)(void* region);
  void (*drop_remote)(void* remote);

  /* Has the peer at the other end of the connection answer, as Peer.call: waits for it until the deadline, of
   * CLOCK_MONOTONIC. The answer is handed over by one call of `write`. */
  int (*call)(void* context, uint64_t connection, const char* method, const void* body, size_t nbytes,
              uint64_t deadline_ns, void* reply, void (*write)(void* reply, const void* bytes, size_t nbytes),
              void** failure);

  /* Starts to move one block, out of the region when `write` is not 0. The run, or null and a failure. */
  void* (*begin)(void* context, int write, void* region, void* remote, uint64_t offset,
                 uint64_t remote_offset, uint64_t nbytes, void** failure);
  /* Waits for it, and ends it when the deadline has passed, or with Ctrl-C. The memory is the caller's again,
   * unless the failure says otherwise. Once for each run. */
  int (*finish)(void* run, uint64_t deadline_ns, void** failure);
  /* Has a run end soon, with the failure TransferCancelled. */
  void (*cancel)(void* run);
  /* Forgets a run that is finished. */
  void (*end)(void* run);

  /* (py) Sets the exception, of mooncake_transfer.errors. */
  void (*raise)(void* failure);
};

#ifdef __cplusplus
}
#endif

#endif
