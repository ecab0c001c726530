// Reads the options of an endpoint, which the driver's options.py has checked and written as strings.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "mooncake_driver.h"
#include "status.hpp"

namespace mooncake::driver {

// Every option is read by name; finish() then tells the first thing that was wrong:
//   OptionReader reader("x", given, count);
//   reader.number("workers", &options.workers, 0u, 64u);
//   return reader.finish();
class OptionReader {
 public:
  OptionReader(const char* driver, const mc_option* given, size_t count) : driver_(driver) {
    if (given == nullptr && count > 0) {
      fail("the list of options is null");
      return;
    }
    given_ = {given, count};
    known_.resize(count, false);
    for (const mc_option& option : given_) {
      if (option.name == nullptr || option.value == nullptr) {
        fail("an option has no name or value");
        given_ = {};
        return;
      }
    }
  }

  // Each leaves its target as it is when the option was not given.
  template <class Number>
  void number(std::string_view name, Number* target, Number least, Number most) {
    const char* value = find(name);
    if (value == nullptr) return;
    std::string_view text(value);
    Number parsed{};
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
    bool whole = error == std::errc{} && end == text.data() + text.size();
    if (!whole || !(parsed >= least && parsed <= most)) {
      return fail("option " + std::string(name) + ": '" + value + "' is not a number from " +
                  std::to_string(least) + " to " + std::to_string(most));
    }
    *target = parsed;
  }
  void flag(std::string_view name, bool* target) {
    const char* value = find(name);
    if (value == nullptr) return;
    std::string_view text(value);
    if (text != "true" && text != "false")
      return fail("option " + std::string(name) + ": '" + value + "' is neither true nor false");
    *target = text == "true";
  }
  void text(std::string_view name, std::string* target) {
    if (const char* value = find(name)) *target = value;
  }

  Status finish() {
    for (size_t i = 0; i < given_.size() && status_.ok(); ++i) {
      if (!known_[i]) fail("there is no option '" + std::string(given_[i].name) + "'");
    }
    return status_;
  }

 private:
  const char* find(std::string_view name) {
    const char* value = nullptr;
    for (size_t i = 0; i < given_.size(); ++i) {
      if (given_[i].name != name) continue;
      known_[i] = true;
      value = given_[i].value;
    }
    return value;
  }
  void fail(std::string reason) {
    if (status_.ok()) status_ = failed(MC_INVALID, std::string(driver_) + " driver: " + std::move(reason));
  }

  const char* driver_;
  std::span<const mc_option> given_;
  std::vector<bool> known_;
  Status status_;
};

}  // namespace mooncake::driver
