// SPDX-License-Identifier: Apache-2.0
// The smallest test harness that says where it failed, and with which seed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace seer::testing {

// Where a test's random numbers start: SEER_TEST_SEED, or the same every time.
inline std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const char* given = std::getenv("SEER_TEST_SEED");
    return given ? std::strtoull(given, nullptr, 10) : std::uint64_t{7};
  }();
  return value;
}

// The last line of a test program.
inline int passed(const char* name) {
  std::printf("%s: all checks passed (seed %llu)\n", name, static_cast<unsigned long long>(seed()));
  return 0;
}

}  // namespace seer::testing

#define CHECK(condition)                                                                                \
  do {                                                                                                  \
    if (!(condition)) {                                                                                 \
      std::fprintf(stderr, "%s:%d: failed: %s (SEER_TEST_SEED=%llu)\n", __FILE__, __LINE__, #condition, \
                   static_cast<unsigned long long>(::seer::testing::seed()));                           \
      std::exit(1);                                                                                     \
    }                                                                                                   \
  } while (false)
