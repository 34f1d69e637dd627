// SPDX-License-Identifier: Apache-2.0
// Products against the sum they are defined as, bit by bit: any shape, any vector width, any number of threads.
#include "engine/product.h"

#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "testing/check.h"

using namespace seer::engine;

namespace {

std::vector<float> random_floats(std::mt19937& rng, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(rng);
  return values;
}

// Whether vectors of this width multiply and add in one rounding.
bool is_fused(int width) {
#if defined(__x86_64__)
  return width > 4;
#else
  return width == 4;
#endif
}

struct Case {
  int64_t rows, inner, outer;
  bool has_bias;
  std::vector<float> x, weight, bias, panels;

  Case(std::mt19937& rng, int64_t num_rows, int64_t num_inner, int64_t num_outer)
      : rows(num_rows), inner(num_inner), outer(num_outer), has_bias(rng() % 2), x(random_floats(rng, rows * inner)),
        weight(random_floats(rng, inner * outer)), bias(random_floats(rng, outer)),
        panels(static_cast<size_t>(num_panels(outer) * inner * kPanel), NAN) {
    pack(weight.data(), panels.data(), inner, outer);
  }

  float expected(int64_t row, int64_t column, bool fused) const {
    float total = has_bias ? bias[static_cast<size_t>(column)] : 0.0f;
    for (int64_t k = 0; k < inner; ++k) {
      const float a = x[static_cast<size_t>(row * inner + k)], b = weight[static_cast<size_t>(column * inner + k)];
      if (fused) {
        total = std::fma(a, b, total);
      } else {
        const float product = a * b;
        total += product;
      }
    }
    return total;
  }

  std::vector<float> product(int width) const {
    std::vector<float> out(static_cast<size_t>(rows * outer), NAN);
    const Product product{x.data(), panels.data(), has_bias ? bias.data() : nullptr, out.data(), rows, inner, outer};
    if (width == 0) multiply(product);
    else multiply(product, width);
    return out;
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void panels_hold_the_weights_and_zeros(const Case& of) {
  for (int64_t panel = 0; panel < num_panels(of.outer); ++panel)
    for (int64_t k = 0; k < of.inner; ++k)
      for (int64_t c = 0; c < kPanel; ++c) {
        const int64_t column = panel * kPanel + c;
        const float expected = column < of.outer ? of.weight[static_cast<size_t>(column * of.inner + k)] : 0.0f;
        CHECK(of.panels[static_cast<size_t>((panel * of.inner + k) * kPanel + c)] == expected);
      }
}

void every_width_gives_the_defined_sum(const Case& of) {
  for (const int width : widths()) {
    const std::vector<float> out = of.product(width);
    for (int64_t row = 0; row < of.rows; ++row)
      for (int64_t column = 0; column < of.outer; ++column)
        CHECK(out[static_cast<size_t>(row * of.outer + column)] == of.expected(row, column, is_fused(width)));
  }
  CHECK(same_bits(of.product(0), of.product(widths().front())));
}

// Each of several threads has helpers of its own.
void threads_change_no_bit(std::mt19937& rng) {
  const Case large(rng, 9, 160, 1000), small(rng, 3, 10, 100);
  const std::vector<float> expected_large = large.product(0), expected_small = small.product(0);
  const auto work = [&](int count) {
    for (int round = 0; round < 8; ++round) {
      use_threads(1 + (count + round) % 4);
      CHECK(same_bits(large.product(0), expected_large));
      CHECK(same_bits(small.product(0), expected_small));
    }
    use_threads(1);
  };
  std::thread other(work, 1);
  work(2);
  other.join();
}

}  // namespace

int main() {
  std::mt19937 rng(static_cast<unsigned>(seer::testing::seed()));
  for (int64_t rows = 1; rows <= 20; ++rows) {
    const Case of(rng, rows, 1 + static_cast<int64_t>(rng() % 40), 1 + static_cast<int64_t>(rng() % 150));
    panels_hold_the_weights_and_zeros(of);
    every_width_gives_the_defined_sum(of);
  }
  for (const int64_t inner : {767, 768, 769, 1700}) every_width_gives_the_defined_sum(Case(rng, 7, inner, 60));
  threads_change_no_bit(rng);
  return seer::testing::passed("product");
}
