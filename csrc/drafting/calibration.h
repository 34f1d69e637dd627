// Turns a draft node's raw confidence into the frequency with which such nodes are really accepted.
//
// The back-off estimate orders nodes well but is optimistic, more so on noisy text. Verification tells us, node by
// node, what was accepted; we keep accepted and total per bin of raw confidence, make the rates monotone (pool adjacent
// violators) and interpolate linearly between the bins' means. The map is strictly increasing, so it changes no
// ranking, and it can be inverted: `observe` takes the corrected value a caller was given.
//
// Thread-safe: bins are relaxed atomics, the map is rebuilt under a mutex that nobody waits for.
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

  // Accepted frequency of nodes with this raw confidence, in (0, 1).
  float correct(float raw) const {
    // The bin's own knot or the one after, as knots lie within their bins.
    return interpolate(x_, y_, std::clamp(static_cast<int>(raw * kBins), 0, kBins) + 1, raw);
  }
  // The raw confidence that `correct` maps here.
  float invert(float corrected) const { return interpolate(y_, x_, 1, corrected); }
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
  // `guess` is a knot near the value: the search starts there.
  static float interpolate(const Knots& from, const Knots& to, int guess, float value);

  Bin bins_[kBins];
  Knots x_;  // raw confidence, strictly increasing from 0 to 1
  Knots y_;  // corrected confidence, strictly increasing
  std::atomic<std::uint32_t> observed_{0};
  std::mutex rebuilding_;
};

}  // namespace seer::drafting
