/*
 * shim.h - HIXL's C++ engine as C functions. HIXL passes C++ strings, vectors and maps, whose layout is that
 * of the compiler that CANN was built for; so shim.cpp is compiled on the machine that has CANN, and the
 * driver loads what comes out of it.
 *
 * A status is HIXL's own number: 0 is success. Functions are called from one thread, in whose ACL context the
 * engine was created.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MC_ASCEND_SHIM_VERSION 1u

typedef struct mc_ascend_desc {
  uint64_t local;
  uint64_t remote;
  uint64_t length;
} mc_ascend_desc;

typedef enum mc_ascend_state {
  MC_ASCEND_WAITING = 0,
  MC_ASCEND_COMPLETED = 1,
  MC_ASCEND_TIMEOUT = 2,
  MC_ASCEND_FAILED = 3
} mc_ascend_state;

typedef struct mc_ascend_shim {
  uint32_t version;    /* MC_ASCEND_SHIM_VERSION */
  const char* library; /* what it was compiled against: "hixl" or "adxl" */
  uint32_t (*create)(const char* local_engine, const char* const* names, const char* const* values,
                     size_t count, void** engine);
  void (*destroy)(void* engine);
  uint32_t (*register_memory)(void* engine, uint64_t address, uint64_t length, int on_device, void** handle);
  uint32_t (*deregister_memory)(void* engine, void* handle);
  uint32_t (*connect)(void* engine, const char* remote, int32_t timeout_ms);
  uint32_t (*disconnect)(void* engine, const char* remote, int32_t timeout_ms);
  uint32_t (*transfer)(void* engine, const char* remote, int is_write, const mc_ascend_desc* descs,
                       size_t count, void** request);
  uint32_t (*query)(void* engine, void* request, mc_ascend_state* state);
} mc_ascend_shim;

/* The one symbol of the shared object. */
const mc_ascend_shim* mc_ascend_shim_table(void);

#ifdef __cplusplus
}
#endif
