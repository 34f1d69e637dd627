// SPDX-License-Identifier: Apache-2.0
// How often does a context know the next token? Learned, not assumed.
//
// Back-off needs, for each context, the probability that the true next token is among the followers seen so far, given
// that no longer context knew it. That depends on how long the match is, how often it was followed and by how many
// different tokens, so it is a table over buckets of the three. Every append teaches it. One table serves all groups of
// a process and survives them: what it learns is a property of the policy, not of a prompt.
//
// A cell is one word, so that teaching it is one addition: observations in the upper half, those that knew in the
// lower, both in units of 1/kUnit.
//
// Thread-safe by relaxed atomics; a lost update now and then is harmless.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace seer::drafting {

class HitTable {
 public:
  HitTable() {
    for (int l = 0; l < kLengths; ++l) {
      for (int c = 0; c < kCounts; ++c) {
        for (int d = 0; d < kDegrees; ++d) {
          // A mild prior, worth kPriorWeight observations: longer, more frequent and wider contexts know more.
          const float prior = std::min(0.97f, 0.25f + 0.07f * l + 0.02f * c + 0.1f * d);
          const std::uint32_t total = kPriorWeight * kUnit;
          const std::uint32_t known = static_cast<std::uint32_t>(total * prior + 0.5f);
          cell_[l][c][d].store(total << 16 | known, std::memory_order_relaxed);
        }
      }
    }
  }

  float probability(std::uint32_t length, std::uint32_t count, std::uint32_t degree) const {
    const std::uint32_t cell = at(length, count, degree).load(std::memory_order_relaxed);
    return static_cast<float>(cell & 0xffff) / static_cast<float>(cell >> 16);
  }

  // A context of `length` tokens, followed `count` times by `degree` different tokens, did or did not know the next
  // one.
  void observe(std::uint32_t length, std::uint32_t count, std::uint32_t degree, bool known) {
    std::atomic<std::uint32_t>& cell = const_cast<std::atomic<std::uint32_t>&>(at(length, count, degree));
    std::uint32_t both = cell.load(std::memory_order_relaxed) + (known ? kUnit << 16 | kUnit : kUnit << 16);
    if (both >= kForgetAt * kUnit << 16) both = both >> 1 & 0x7fff7fff;
    cell.store(both, std::memory_order_relaxed);
  }

 private:
  static constexpr int kLengths = 13, kCounts = 9, kDegrees = 4;
  static constexpr std::uint32_t kUnit = 16;
  static constexpr std::uint32_t kPriorWeight = 4;
  static constexpr std::uint32_t kForgetAt = 2048;  // halve here: a new policy is learned in a few thousand tokens

  const std::atomic<std::uint32_t>& at(std::uint32_t length, std::uint32_t count, std::uint32_t degree) const {
    return cell_[length_bucket(length)][count_bucket(count)][degree_bucket(degree)];
  }
  // 1 2 3 4 5-6 7-8 9-12 13-16 17-24 25-32 33-48 49-64 65-
  static int length_bucket(std::uint32_t n) {
    static constexpr std::uint8_t bucket[66] = {0,  0,  1,  2,  3,  4,  4,  5,  5,  6,  6,  6,  6,  7,  7,  7,  7,
                                                8,  8,  8,  8,  8,  8,  8,  8,  9,  9,  9,  9,  9,  9,  9,  9,  10,
                                                10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 11, 11,
                                                11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 12};
    return bucket[std::min(n, 65u)];
  }
  // 1 2 3 4-5 6-8 9-16 17-32 33-128 129-
  static int count_bucket(std::uint32_t n) {
    static constexpr std::uint8_t bucket[34] = {0, 0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 5,
                                                6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 7};
    return bucket[std::min(n, 33u)] + (n > 128);
  }
  // 1 2 3-4 5-
  static int degree_bucket(std::uint32_t n) {
    static constexpr std::uint8_t bucket[6] = {0, 0, 1, 2, 2, 3};
    return bucket[std::min(n, 5u)];
  }

  std::atomic<std::uint32_t> cell_[kLengths][kCounts][kDegrees];
};

}  // namespace seer::drafting
