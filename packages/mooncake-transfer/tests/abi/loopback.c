/* A driver in C that moves bytes within its process, compiled by tests against the headers of several versions. Its
 * option "lie" makes it break its contract in one way. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mooncake_driver.h"

#ifndef MAJOR
#define MAJOR MC_ABI_MAJOR
#endif

#define QUEUE 65536

struct memory {
  uint64_t address, length, key[2];
};

static struct {
  pthread_mutex_t lock;
  char lie[32];
  mc_completion done[QUEUE];
  size_t head, tail;
#ifdef MC_NOTICE_MAX
  mc_notice notices[QUEUE];
  size_t first_notice, last_notice;
#endif
} self = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char* reason = "";
static uint64_t seen_memory_size, seen_caps_size;

uint64_t loopback_memory_size(void) { return seen_memory_size; }
uint64_t loopback_caps_size(void) { return seen_caps_size; }

static int lies(const char* how) { return strcmp(self.lie, how) == 0; }

static mc_status refuse(mc_status status, const char* why) {
  reason = why;
  return status;
}

static mc_status open_endpoint(const mc_option* options, size_t count, mc_handle* endpoint) {
  self.head = self.tail = 0;
  self.lie[0] = 0;
#ifdef MC_NOTICE_MAX
  self.first_notice = self.last_notice = 0;
#endif
  for (size_t i = 0; i < count; ++i) {
    if (strcmp(options[i].name, "lie") == 0) strncpy(self.lie, options[i].value, sizeof self.lie - 1);
  }
  if (lies("words of garbage")) return refuse(MC_IO, "bro\xffken \xc3");
  *endpoint = lies("no endpoint") ? 0 : 1;
  return MC_OK;
}

static void close_endpoint(mc_handle endpoint) { (void)endpoint; }

static mc_status caps(mc_handle endpoint, mc_caps* caps) {
  (void)endpoint;
  seen_caps_size = caps->struct_size;
  caps->memory_kinds = lies("no memory") ? 0 : 1u << MC_DRAM;
  caps->bandwidth_bytes_per_s = 1000000000;
  caps->latency_ns = 1000;
  caps->alignment = lies("odd alignment") ? 3 : 1;
#ifdef MC_NOTICE_MAX
  if (strstr(self.lie, "notice") != NULL)
    caps->notice_bytes = lies("unheard-of notices") ? MC_NOTICE_MAX + 1 : MC_NOTICE_MAX;
#endif
#ifdef FUTURE
  if (caps->struct_size >= sizeof *caps) caps->future = 1;
#endif
  return MC_OK;
}

static mc_status stats(mc_handle endpoint, mc_stats* stats) {
  (void)endpoint;
  (void)stats;
  return MC_OK;
}

static const char* last_error(void) { return reason; }

static mc_status export_address(mc_handle endpoint, void* blob, size_t* length) {
  (void)endpoint;
  if (lies("endless address")) {
    *length = (size_t)1 << 40;
    return MC_OK;
  }
  memcpy(blob, "loop", 4);
  *length = 4;
  return MC_OK;
}

static mc_status connect_peer(mc_handle endpoint, const void* address, size_t length, mc_handle* connection) {
  (void)endpoint;
  (void)address;
  (void)length;
  if (lies("kept apart")) return refuse(MC_UNREACHABLE, "the two are kept apart");
  if (lies("too far")) return refuse(MC_UNSUPPORTED, "not beyond this host");
  *connection = lies("no connection") ? 0 : 2;
  return MC_OK;
}

static void disconnect(mc_handle endpoint, mc_handle connection) {
  (void)endpoint;
  (void)connection;
}

static mc_status register_memory(mc_handle endpoint, const mc_memory* memory, mc_handle* registered) {
  (void)endpoint;
  seen_memory_size = memory->struct_size;
  struct memory* made = malloc(sizeof *made);
  if (made == NULL) return refuse(MC_NO_MEMORY, "no memory");
  made->address = memory->address;
  made->length = memory->length;
  memcpy(made->key, memory->key, sizeof made->key);
  *registered = (mc_handle)(uintptr_t)made;
  return MC_OK;
}

static mc_status deregister_memory(mc_handle endpoint, mc_handle registered, uint64_t deadline_ns) {
  (void)endpoint;
  (void)deadline_ns;
  free((struct memory*)(uintptr_t)registered);
  return MC_OK;
}

static mc_status export_key(mc_handle endpoint, mc_handle registered, void* blob, size_t* length) {
  (void)endpoint;
  memcpy(blob, (void*)(uintptr_t)registered, sizeof(struct memory));
  *length = sizeof(struct memory);
  return MC_OK;
}

static mc_status import_key(mc_handle endpoint, mc_handle connection, uint64_t region_id,
                            const uint8_t key[MC_KEY_BYTES], uint64_t region_length, const void* blob,
                            size_t length, mc_handle* remote) {
  (void)endpoint;
  (void)connection;
  (void)region_id;
  (void)region_length;
  struct memory* made = malloc(sizeof *made);
  if (made == NULL) return refuse(MC_NO_MEMORY, "no memory");
  memset(made, 0, sizeof *made);
  memcpy(made, blob, length < sizeof *made ? length : sizeof *made);
  if (memcmp(made->key, key, MC_KEY_BYTES) != 0) made->length = 0;
  *remote = (mc_handle)(uintptr_t)made;
  return MC_OK;
}

static void release_key(mc_handle endpoint, mc_handle remote) {
  (void)endpoint;
  free((struct memory*)(uintptr_t)remote);
}

static void push(uint64_t cookie, uint64_t bytes, int status, const char* why, size_t length) {
  mc_completion* slot = &self.done[self.tail++ % QUEUE];
  memset(slot, 0, sizeof *slot);
  slot->cookie = cookie;
  slot->bytes = bytes;
  slot->status = status;
  memcpy(slot->reason, why, length);
}

static void run(const mc_op* op) {
  struct memory* local = (struct memory*)(uintptr_t)op->local;
  struct memory* remote = (struct memory*)(uintptr_t)op->remote;
  if (op->remote_offset + op->length > remote->length) {
    push(op->cookie, 0, MC_REFUSED, "outside", 7);
    return;
  }
  void* here = (void*)(uintptr_t)(local->address + op->local_offset);
  void* there = (void*)(uintptr_t)(remote->address + op->remote_offset);
  if (op->opcode == MC_READ) memcpy(here, there, op->length);
  if (op->opcode == MC_WRITE) memcpy(there, here, op->length);
  char words[MC_REASON_MAX];
  memset(words, 'x', sizeof words);
  if (lies("silence")) return;
  if (lies("unknown status")) return push(op->cookie, 0, 77, "", 0);
  if (lies("endless reason")) return push(op->cookie, 0, MC_IO, words, sizeof words);
  if (lies("reason of garbage")) return push(op->cookie, 0, MC_IO, "\xff\xfe wire", 7);
  if (lies("fewer bytes")) return push(op->cookie, op->length - 1, MC_OK, "", 0);
  if (lies("unknown cookie")) {
    push(op->cookie ^ 0x5a5a5a5a5a5a5a5au, op->length, MC_OK, "", 0);
    push(0, op->length, MC_OK, "", 0);
    push(op->cookie ^ 1, op->length, MC_OK, "", 0);
  }
  push(op->cookie, op->length, MC_OK, "", 0);
  if (lies("twice")) push(op->cookie, op->length, MC_OK, "", 0);
}

static mc_status submit(mc_handle endpoint, const mc_op* ops, size_t count, size_t* accepted) {
  (void)endpoint;
  pthread_mutex_lock(&self.lock);
  for (size_t i = 0; i < count; ++i) run(&ops[i]);
  pthread_mutex_unlock(&self.lock);
  *accepted = lies("too many accepted") ? count + 1000 : count;
  return MC_OK;
}

static mc_status poll(mc_handle endpoint, mc_completion* completions, size_t capacity, size_t* count) {
  (void)endpoint;
  size_t n = 0;
  pthread_mutex_lock(&self.lock);
  while (n < capacity && self.head != self.tail) completions[n++] = self.done[self.head++ % QUEUE];
  pthread_mutex_unlock(&self.lock);
  *count = n != 0 && lies("too many polled") ? capacity + 1000 : n;
  return MC_OK;
}

static int event_fd(mc_handle endpoint) {
  (void)endpoint;
  return -1;
}

static mc_status arm(mc_handle endpoint) {
  (void)endpoint;
  return self.head == self.tail ? MC_OK : MC_AGAIN;
}

static mc_status cancel(mc_handle endpoint, uint64_t cookie) {
  (void)endpoint;
  if (lies("silence")) push(cookie, 0, MC_CANCELLED, "", 0);
  return MC_OK;
}

#ifdef MC_NOTICE_MAX
static mc_status notify(mc_handle endpoint, mc_handle connection, const void* data, size_t length,
                        uint64_t cookie) {
  (void)endpoint;
  (void)connection;
  pthread_mutex_lock(&self.lock);
  mc_notice* notice = &self.notices[self.last_notice++ % QUEUE];
  notice->length = (uint32_t)length;
  memcpy(notice->data, data, length);
  push(cookie, lies("notice of many bytes") ? 9 : 0, MC_OK, "", 0);
  if (lies("notice done twice")) push(cookie, 0, MC_OK, "", 0);
  pthread_mutex_unlock(&self.lock);
  return MC_OK;
}

static mc_status poll_notices(mc_handle endpoint, mc_notice* notices, size_t capacity, size_t* count) {
  (void)endpoint;
  size_t n = 0;
  pthread_mutex_lock(&self.lock);
  while (n < capacity && self.first_notice != self.last_notice) {
    notices[n] = self.notices[self.first_notice++ % QUEUE];
    if (lies("endless notice")) notices[n].length = 1u << 30;
    if (lies("empty notice")) notices[n].length = 0;
    ++n;
  }
  pthread_mutex_unlock(&self.lock);
  *count = n != 0 && lies("too many notices") ? capacity + 1000 : n;
  return MC_OK;
}
#endif

const struct mc_driver_v1 loopback = {
    .abi_major = MAJOR,
    .abi_minor = MC_ABI_MINOR,
#ifdef CUT
    .struct_size = offsetof(struct mc_driver_v1, cancel),
#else
    .struct_size = sizeof(struct mc_driver_v1),
#endif
    .name = "loopback",
    .open = open_endpoint,
    .close = close_endpoint,
    .caps = caps,
    .stats = stats,
    .last_error = last_error,
    .export_address = export_address,
    .connect = connect_peer,
    .disconnect = disconnect,
    .register_memory = register_memory,
    .deregister_memory = deregister_memory,
    .export_key = export_key,
    .import_key = import_key,
    .release_key = release_key,
    .submit = submit,
#ifdef HOLE
    .poll = 0 ? poll : NULL,
#else
    .poll = poll,
#endif
    .event_fd = event_fd,
    .arm = arm,
    .cancel = cancel,
#ifdef MC_NOTICE_MAX
    .notify = notify,
    .poll_notices = poll_notices,
#endif
};
