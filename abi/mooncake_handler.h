/* How compiled code of other packages answers requests that peers send over an engine's channel, without the
 * interpreter: TransferEngine.serve_compiled(method, capsule) takes a PyCapsule named MC_HANDLER_CAPSULE with
 * one of these. Plain C, no exceptions across it. Later minor versions only add fields at the end. */
#ifndef MOONCAKE_HANDLER_H
#define MOONCAKE_HANDLER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MC_HANDLER_CAPSULE "mooncake.handler.v1"
#define MC_HANDLER_ABI_MAJOR 1u
#define MC_HANDLER_ABI_MINOR 0u

struct mc_handler_v1 {
  uint32_t abi_major, abi_minor;
  size_t struct_size;
  void* context; /* handed to every call */
  /* Answers one request of an incoming connection, by calling `write` any number of times; together at most
   * 64 MiB, else the connection ends. On the thread that has read the request: it holds up every peer of the
   * engine, so it must neither wait for long nor take the interpreter's lock. By several threads at the same
   * time. `connection` is Caller.connection of the Python side. */
  void (*answer)(void* context, uint64_t connection, const void* body, size_t nbytes, void* reply,
                 void (*write)(void* reply, const void* bytes, size_t nbytes));
};

#ifdef __cplusplus
}
#endif

#endif
