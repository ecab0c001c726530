// What each file of the binding adds to the module.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <string_view>

namespace mooncake::store {

inline constexpr size_t kDigestBytes = 16;

inline std::string_view view(const nanobind::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
inline nanobind::bytes as_bytes(std::string_view text) { return nanobind::bytes(text.data(), text.size()); }

void bind_space(nanobind::module_& m);
void bind_map(nanobind::module_& m);
void bind_records(nanobind::module_& m);
void bind_tier_records(nanobind::module_& m);
void bind_layout(nanobind::module_& m);
void bind_desk(nanobind::module_& m);
void bind_express(nanobind::module_& m);
void bind_quick(nanobind::module_& m);

}  // namespace mooncake::store
