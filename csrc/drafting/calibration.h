// SPDX-License-Identifier: Apache-2.0
// Turns a draft node's raw confidence into the frequency with which such nodes are really accepted.
//
// The back-off estimate orders nodes well but is optimistic, more so on noisy text. Verification tells us, node by
// node, what was accepted; we keep accepted and total per bin of raw confidence, make the rates monotone (pool adjacent
// violators) and interpolate linearly between the bins' means. The map is strictly increasing, so it changes no
// ranking, and it can be inverted: `observe` takes the raw value of what a caller was given.
//
// Thread-safe: bins are relaxed atomics, the map is rebuilt under a mutex that is only tried, never waited for. A reader takes a copy
// of the map, for a batch of drafts, say: plain floats are read in half the time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace seer::drafting {

class Calibration {
 public:
  static constexpr int kBins = 32;

  Calibration();

  // One map from raw confidence to accepted frequency. A copy made during a rebuild may have knots of both maps.
  class Map {
   public:
    // Accepted frequency of nodes with this raw confidence, in (0, 1); raw is in [0, 1].
    float correct(float raw) const {
      // A bin's knot lies within it, so the value is before it or after it. No branch: which one is a coin toss.
      const int knot = std::min(static_cast<int>(raw * kBins), kBins - 1) + 1;
      return between(x_, y_, knot + (x_[knot] < raw ? 1 : 0), raw);
    }
    // The raw confidence that `correct` maps here.
    float invert(float corrected) const;

   private:
    friend class Calibration;
    // The value of the line through knots k - 1 and k.
    static float between(const float* from, const float* to, int k, float value) {
      const float part = (value - from[k - 1]) / (from[k] - from[k - 1]);
      return to[k - 1] + std::min(std::max(part, 0.0f), 1.0f) * (to[k] - to[k - 1]);
    }
    float x_[kBins + 2];  // raw confidence, strictly increasing from 0 to 1: one knot per bin, and the ends
    float y_[kBins + 2];  // corrected confidence, strictly increasing
  };

  Map map() const;
  // A node with this raw confidence was, or was not, accepted.
  void observe(float raw, bool accepted);

 private:
  static constexpr int kKnots = kBins + 2;             // one per bin, plus the ends
  static constexpr std::uint32_t kRebuildEvery = 256;  // observations between two maps
  static constexpr float kPriorWeight = 16;            // observations the identity map is worth, per bin
  static constexpr float kForgetAt = 8192;             // halve a bin here, to follow the policy

  struct Bin {
    std::atomic<float> raw_sum{0};
    std::atomic<float> accepted{0};
    std::atomic<float> total{0};
  };
  using Knots = std::atomic<float>[kKnots];

  void rebuild();
  Bin bins_[kBins];
  Knots x_, y_;  // of the map
  std::atomic<std::uint32_t> observed_{0};
  std::mutex rebuilding_;
};

}  // namespace seer::drafting
