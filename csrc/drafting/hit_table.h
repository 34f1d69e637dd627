// How often does a context know the next token? Learned, not assumed.
//
// Back-off needs, for each context, the probability that the true next token is among the followers seen so far. That
// depends on how long the match is, how often it was followed and by how many different tokens, so it is a table over
// buckets of the three. Every append teaches it. One table serves all groups of a process and
// survives them: what it learns is a property of the policy, not of a prompt.
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
          cell_[l][c][d].total.store(kPriorWeight, std::memory_order_relaxed);
          cell_[l][c][d].known.store(kPriorWeight * prior, std::memory_order_relaxed);
        }
      }
    }
  }

  float probability(std::uint32_t length, std::uint32_t count, std::uint32_t degree) const {
    const Cell& cell = at(length, count, degree);
    return cell.known.load(std::memory_order_relaxed) / cell.total.load(std::memory_order_relaxed);
  }

  // A context of `length` tokens, followed `count` times by `degree` different tokens, did or did not know the next one.
  void observe(std::uint32_t length, std::uint32_t count, std::uint32_t degree, bool known) {
    Cell& cell = const_cast<Cell&>(at(length, count, degree));
    float total = cell.total.load(std::memory_order_relaxed) + 1;
    float hits = cell.known.load(std::memory_order_relaxed) + (known ? 1 : 0);
    if (total > kForgetAt) {
      total *= 0.5f;
      hits *= 0.5f;
    }
    cell.known.store(hits, std::memory_order_relaxed);
    cell.total.store(total, std::memory_order_relaxed);
  }

 private:
  static constexpr int kLengths = 13, kCounts = 9, kDegrees = 4;
  static constexpr float kPriorWeight = 4;
  static constexpr float kForgetAt = 2048;  // halve here, so that a new policy is learned within a few thousand tokens

  struct Cell {
    std::atomic<float> known{0};
    std::atomic<float> total{0};
  };

  const Cell& at(std::uint32_t length, std::uint32_t count, std::uint32_t degree) const {
    return cell_[length_bucket(length)][count_bucket(count)][degree_bucket(degree)];
  }
  // 1 2 3 4 5-6 7-8 9-12 13-16 17-24 25-32 33-48 49-64 65-
  static int length_bucket(std::uint32_t n) {
    static constexpr std::uint8_t bucket[65] = {
        0,  0,  1,  2,  3,  4,  4,  5,  5,  6,  6,  6,  6,  7,  7,  7,  7,  8,  8,  8,  8,  8,
        8,  8,  8,  9,  9,  9,  9,  9,  9,  9,  9,  10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10,
        10, 10, 10, 10, 10, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11};
    return n <= 64 ? bucket[n] : 12;
  }
  // 1 2 3 4-5 6-8 9-16 17-32 33-128 129-
  static int count_bucket(std::uint32_t n) {
    if (n <= 3) return n == 0 ? 0 : static_cast<int>(n) - 1;
    return n <= 5 ? 3 : n <= 8 ? 4 : n <= 16 ? 5 : n <= 32 ? 6 : n <= 128 ? 7 : 8;
  }
  // 1 2 3-4 5-
  static int degree_bucket(std::uint32_t n) { return n <= 1 ? 0 : n == 2 ? 1 : n <= 4 ? 2 : 3; }

  Cell cell_[kLengths][kCounts][kDegrees];
};

}  // namespace seer::drafting
