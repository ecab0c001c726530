// Preloaded: a process in which no thread is to be had while a test says so.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>

namespace {
std::atomic<bool> refused{false};
}

extern "C" void refuse_threads(bool value) { refused = value; }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                              void* argument) {
  static auto* const create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return refused ? EAGAIN : create(thread, attributes, body, argument);
}
