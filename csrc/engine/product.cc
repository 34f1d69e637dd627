// SPDX-License-Identifier: Apache-2.0
#include "product.h"

#include <algorithm>
#include <memory>

#include "crew.h"
#include "vectors.h"

namespace seer::engine {
namespace {

// Of `inner`, this much of a panel is worked on at a time: it and the next fit a second-level cache of 1 MiB beside the
// rows, and loading and storing the sums in between does not show.
constexpr int64_t kPiece = 768;
constexpr int64_t kLineFloats = 16;
constexpr int64_t kPanelLines = kPanel / kLineFloats;
constexpr double kSharedWork = 1e6;  // multiplications below which waking other threads takes longer than the product

// Where the sums of a piece begin and end: [rows][stride], a stride of 0 for the same beginning in every row.
struct Sums {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;

  Sums at(int64_t row, int64_t column) const {
    return {from + row * from_stride + column, from_stride, to + row * to_stride + column, to_stride};
  }
};

// to[r][0..C * W) = from[r] + the sum over k of x[r][k] * weights[k][0..C * W), for R rows. At the same time `Lines` lines of
// `ahead` per k are asked for.
template <int W, int C, int R, int Lines>
SEER_INLINE void add_tile(const float* x, int64_t x_stride, const float* weights, int64_t count, const Sums& sums,
                          const float* ahead) {
  Vector<W> acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = load<W>(sums.from + r * sums.from_stride + c * W);
  for (int64_t k = 0; k < count; ++k) {
    Vector<W> w[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) w[c] = load<W>(weights + k * kPanel + c * W);
#pragma GCC unroll 4
    for (int line = 0; line < Lines; ++line) ask_ahead(ahead + (k * Lines + line) * kLineFloats);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] += x[r * x_stride + k] * w[c];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) store<W>(sums.to + r * sums.to_stride + c * W, acc[r][c]);
}

template <int W, int C, int R>
SEER_INLINE void add_rows(int64_t rows, int64_t lines, const float* x, int64_t x_stride, const float* weights,
                          int64_t count, const Sums& sums, const float* ahead) {
  if (rows < R) {
    if constexpr (R > 1) add_rows<W, C, R - 1>(rows, lines, x, x_stride, weights, count, sums, ahead);
    return;
  }
  switch (lines) {
    case 0:
      return add_tile<W, C, R, 0>(x, x_stride, weights, count, sums, ahead);
    case 1:
      return add_tile<W, C, R, 1>(x, x_stride, weights, count, sums, ahead);
    case 2:
      return add_tile<W, C, R, 2>(x, x_stride, weights, count, sums, ahead);
    default:
      return add_tile<W, C, R, 3>(x, x_stride, weights, count, sums, ahead);
  }
}

// All rows with one piece of a panel, in tiles of R rows and C vectors; the piece that lies behind it is asked for.
template <int W, int C, int R>
SEER_INLINE void add_piece(const Product& p, const float* x, const float* weights, int64_t count, const Sums& sums) {
  static_assert(kPanel % (C * W) == 0, "a panel is a whole number of tiles wide");
  constexpr int64_t kAcross = kPanel / (C * W);
  const float* ahead = weights + count * kPanel;
  const int64_t tiles = (p.rows + R - 1) / R, height = (p.rows + tiles - 1) / tiles;  // all about equally high
  int64_t passes = tiles * kAcross;
  // With one tile of fewer rows the arithmetic waits for memory, which the hardware's own foresight then serves best.
  int64_t due = kAcross == 1 && p.rows < R ? 0 : kPanelLines;
  for (int64_t column = 0; column < kPanel; column += C * W) {
    for (int64_t row = 0; row < p.rows; row += height, --passes) {
      const int64_t lines = (due + passes - 1) / passes;
      add_rows<W, C, R>(std::min(height, p.rows - row), lines, x + row * p.inner, p.inner, weights + column, count,
                        sums.at(row, column), ahead);
      due -= lines, ahead += lines * count * kLineFloats;
    }
  }
}

template <int W, int C, int R>
SEER_INLINE void multiply_panels(const Product& p, int64_t first, int64_t last) {
  thread_local std::vector<float> edge;  // the sums of a panel that is wider than what is left of `out`
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t begin = panel * kPanel, columns = std::min(kPanel, p.outer - begin);
    const bool whole = columns == kPanel;
    if (!whole) edge.resize(static_cast<size_t>(p.rows * kPanel));
    float* to = whole ? p.out + begin : edge.data();
    const int64_t stride = whole ? p.outer : kPanel;
    float start[kPanel] = {};
    if (p.bias != nullptr) std::copy(p.bias + begin, p.bias + begin + columns, start);
    for (int64_t k = 0; k < p.inner; k += kPiece) {
      const float* weights = p.panels + (panel * p.inner + k) * kPanel;
      const Sums sums = k == 0 ? Sums{start, 0, to, stride} : Sums{to, stride, to, stride};
      add_piece<W, C, R>(p, p.x + k, weights, std::min(kPiece, p.inner - k), sums);
    }
    if (whole) continue;
    for (int64_t row = 0; row < p.rows; ++row)
      std::copy(to + row * kPanel, to + row * kPanel + columns, p.out + row * p.outer + begin);
  }
}

using Panels = void (*)(const Product&, int64_t first, int64_t last);

// Tiles fill the registers: 32 of 16 floats, 16 of 8, 16 of 4 (or 32, where it is not x86).
#ifdef SEER_X86_LEVELS
__attribute__((target("arch=x86-64-v4"))) void panels_of_16(const Product& p, int64_t first, int64_t last) {
  multiply_panels<16, 3, 8>(p, first, last);
}
__attribute__((target("arch=x86-64-v3"))) void panels_of_8(const Product& p, int64_t first, int64_t last) {
  multiply_panels<8, 2, 6>(p, first, last);
}
void panels_of_4(const Product& p, int64_t first, int64_t last) { multiply_panels<4, 3, 4>(p, first, last); }
#else
void panels_of_4(const Product& p, int64_t first, int64_t last) { multiply_panels<4, 3, 8>(p, first, last); }
#endif

Panels panels_for(int width) {
#ifdef SEER_X86_LEVELS
  if (width == 16) return panels_of_16;
  if (width == 8) return panels_of_8;
#endif
  return panels_of_4;
}

thread_local std::unique_ptr<Crew> crew;

}  // namespace

void pack(const float* weight, float* panels, int64_t inner, int64_t outer) {
  // A line of each row at a time: read once, and written to a part of the panel that the first-level cache holds.
  for (int64_t first = 0; first < outer; first += kPanel, panels += inner * kPanel) {
    const int64_t columns = std::min(kPanel, outer - first);
    if (columns < kPanel) std::fill(panels, panels + inner * kPanel, 0.0f);
    for (int64_t k = 0; k < inner; k += kLineFloats) {
      const int64_t end = std::min(k + kLineFloats, inner);
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t i = k; i < end; ++i) panels[i * kPanel + c] = weight[(first + c) * inner + i];
    }
  }
}

std::vector<int> widths() {
  std::vector<int> found;
#ifdef SEER_X86_LEVELS
  if (__builtin_cpu_supports("x86-64-v4")) found.push_back(16);
  if (__builtin_cpu_supports("x86-64-v3")) found.push_back(8);
#endif
  found.push_back(4);
  return found;
}

void use_threads(int count) {
  if (count == (crew ? crew->size() : 1)) return;
  crew = count > 1 ? std::make_unique<Crew>(count) : nullptr;
}

void multiply(const Product& product, int width) {
  const Panels panels = panels_for(width);
  const int64_t count = num_panels(product.outer);
  const double work = static_cast<double>(product.rows) * static_cast<double>(product.inner * product.outer);
  if (!crew || work < kSharedWork) return panels(product, 0, count);
  const int64_t size = crew->size();
  crew->run([&](int part) { panels(product, part * count / size, (part + 1) * count / size); });
}

void multiply(const Product& product) {
  static const int best = widths().front();
  multiply(product, best);
}

}  // namespace seer::engine
