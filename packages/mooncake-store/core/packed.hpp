// What there is one of per key comes from and goes to Python as one block of bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <string>
#include <vector>

namespace mooncake::store {

template <typename T>
std::span<const T> as_span(const nanobind::bytes& bytes, const char* what) {
  if (bytes.size() % sizeof(T) != 0) {
    std::string text = std::string(what) + " has " + std::to_string(bytes.size()) +
                       " bytes, not a multiple of " + std::to_string(sizeof(T));
    throw nanobind::value_error(text.c_str());
  }
  return {reinterpret_cast<const T*>(bytes.c_str()), bytes.size() / sizeof(T)};
}

template <typename T>
nanobind::bytes packed(const std::vector<T>& values) {
  return nanobind::bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

}  // namespace mooncake::store
