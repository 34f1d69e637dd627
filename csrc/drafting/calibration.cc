// SPDX-License-Identifier: Apache-2.0
#include "calibration.h"

#include <algorithm>

namespace seer::drafting {

namespace {
constexpr auto kRelaxed = std::memory_order_relaxed;
// Keeps the map strictly increasing where pooled bins are level: far below any confidence that matters.
constexpr float kSlope = 1e-4f;
}  // namespace

Calibration::Calibration() {
  for (int b = 0; b < kBins; ++b) {
    const float middle = (b + 0.5f) / kBins;
    bins_[b].raw_sum.store(kPriorWeight * middle, kRelaxed);
    bins_[b].accepted.store(kPriorWeight * middle, kRelaxed);
    bins_[b].total.store(kPriorWeight, kRelaxed);
  }
  rebuild();
}

void Calibration::observe(float raw, bool accepted) {
  Bin& bin = bins_[std::clamp(static_cast<int>(raw * kBins), 0, kBins - 1)];
  const float scale = bin.total.load(kRelaxed) >= kForgetAt ? 0.5f : 1.0f;
  bin.raw_sum.store(bin.raw_sum.load(kRelaxed) * scale + raw, kRelaxed);
  bin.accepted.store(bin.accepted.load(kRelaxed) * scale + (accepted ? 1 : 0), kRelaxed);
  bin.total.store(bin.total.load(kRelaxed) * scale + 1, kRelaxed);
  if (observed_.fetch_add(1, kRelaxed) % kRebuildEvery != kRebuildEvery - 1) return;
  std::unique_lock<std::mutex> lock(rebuilding_, std::try_to_lock);
  if (lock) rebuild();
}

void Calibration::rebuild() {
  // Pool adjacent violators: while a block's rate is not above the one before, merge them.
  struct Block {
    float accepted, total;
    int bins;
  };
  Block blocks[kBins];
  int size = 0;
  float mean[kBins];
  for (int b = 0; b < kBins; ++b) {
    const float total = bins_[b].total.load(kRelaxed);
    mean[b] = std::clamp(bins_[b].raw_sum.load(kRelaxed) / total, float(b) / kBins, float(b + 1) / kBins);
    blocks[size++] = Block{bins_[b].accepted.load(kRelaxed), total, 1};
    while (size > 1 &&
           blocks[size - 1].accepted * blocks[size - 2].total <= blocks[size - 2].accepted * blocks[size - 1].total) {
      blocks[size - 2].accepted += blocks[size - 1].accepted;
      blocks[size - 2].total += blocks[size - 1].total;
      blocks[size - 2].bins += blocks[size - 1].bins;
      --size;
    }
  }
  float x = 0, y = 0;
  x_[0].store(0, kRelaxed);
  y_[0].store(0, kRelaxed);
  int bin = 0;
  for (int k = 0; k < size; ++k) {
    const float rate = std::min(blocks[k].accepted / blocks[k].total, 1.0f);
    for (int i = 0; i < blocks[k].bins; ++i, ++bin) {
      x = std::max(mean[bin], x + kSlope / kBins);
      y = std::max(rate * (1 - kSlope), y + kSlope / kKnots);
      x_[bin + 1].store(x, kRelaxed);
      y_[bin + 1].store(y, kRelaxed);
    }
  }
  x_[kKnots - 1].store(std::max(1.0f, x + kSlope / kBins), kRelaxed);
  y_[kKnots - 1].store(y + kSlope / kKnots, kRelaxed);
}

Calibration::Map Calibration::map() const {
  Map copy;
  for (int k = 0; k < kKnots; ++k) {
    copy.x_[k] = x_[k].load(kRelaxed);
    copy.y_[k] = y_[k].load(kRelaxed);
  }
  return copy;
}

float Calibration::Map::invert(float corrected) const {
  int k = 1;
  while (k < kKnots - 1 && y_[k] < corrected) ++k;
  return between(y_, x_, k, corrected);
}

}  // namespace seer::drafting
