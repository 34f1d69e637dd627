// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "vectors.h"

// One copy of each kernel per instruction set.
#ifdef SEER_X86_LEVELS
#define SEER_KERNEL __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SEER_KERNEL
#endif

namespace seer::engine {
namespace {

constexpr int64_t kLanes = 16;  // sums run in this many interleaved parts whatever the instruction set
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// exp and log as short polynomials (after Cephes) without branches, so that they vectorise and round alike everywhere.
SEER_INLINE float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = std::floor(x * 1.44269504088896341f + 0.5f);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  // Unsigned: for a NaN these bits are arbitrary, and the product below stays NaN.
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return y * scale;
}

// For positive normal x.
SEER_INLINE float fast_log(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  int32_t exponent = ((bits >> 23) & 0xff) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;
  float m;
  std::memcpy(&m, &bits, sizeof m);  // in [0.5, 1)
  const bool low = m < 0.707106781186547524f;
  exponent = low ? exponent - 1 : exponent;
  m = low ? m + m - 1.0f : m - 1.0f;
  const float z = m * m;
  float y = 7.0376836292e-2f;
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z;
  const float e = static_cast<float>(exponent);
  y = y - 2.12194440e-4f * e;
  y = y - 0.5f * z;
  return m + y + 0.693359375f * e;
}

SEER_INLINE uint32_t mix32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

uint64_t mix64(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 64 bits of key per (seed, position); the noise of token v then needs 32-bit arithmetic only.
uint64_t noise_key(uint64_t seed, uint64_t position) { return mix64(mix64(seed) ^ position); }

SEER_INLINE float uniform_of(uint32_t token, uint32_t low, uint32_t high) {
  const uint32_t bits = mix32(mix32(token ^ low) + high);
  // Two 16-bit halves: a signed conversion vectorises on every instruction set, and 2^-32 steps near 0 keep the
  // probability of rare tokens right (the exponential below is small exactly for the tokens that win).
  const float v = static_cast<float>(static_cast<int32_t>(bits >> 16)) * 0x1p-16f +
                  (static_cast<float>(static_cast<int32_t>(bits & 0xffff)) + 0.5f) * 0x1p-32f;
  return v < 0.99999994f ? v : 0.99999994f;
}

SEER_INLINE float gumbel_from(float v) {
  const float w = 1.0f - v;
  // -log1p(-v) from log alone: the quotient cancels the rounding of 1 - v.
  const float delta = w - 1.0f;
  const float safe = delta == 0.0f ? -1.0f : delta;
  const float exponential = delta == 0.0f ? v : fast_log(w) * (v / safe);
  return -fast_log(exponential);
}

// At least gumbel_from(v), from v's exponent alone: -log(-log1p(-v)) <= -log(v).
SEER_INLINE float gumbel_bound(float v) {
  int32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return static_cast<float>(127 - (bits >> 23)) * 0.6931472f + 1e-3f;
}

SEER_INLINE float sum_lanes(const float* lanes) {
  float total = 0.0f;
  for (int64_t i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}

// Attention. A block's part of a layer is in one place and the next block's in another, too far for the hardware to
// guess, so what comes next (`ahead`) is asked for while this is worked on. A line at a time: a burst of requests would
// wait for room in the queue to memory, and the arithmetic with it. Asking twice is harmless.

// s[r][0..W) = q[r] . keys[:, 0..W) for R query rows; each dot product adds over d in order.
template <int W, int R>
SEER_INLINE void score_strip(const float* const* q, const float* keys, int64_t stride, int64_t head_dim,
                             float* const* s, const float* ahead) {
  Vector<W> acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = Vector<W>{};
  for (int64_t d = 0; d < head_dim; ++d) {
    const Vector<W> k = load<W>(keys + d * stride);
    ask_ahead(ahead + d * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] += q[r][d] * k;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store<W>(s[r], acc[r]);
}

template <int W>
SEER_INLINE void score_rows(const float* const* q, int64_t rows, const float* keys, int64_t stride, int64_t head_dim,
                            float* const* s, const float* ahead) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) score_strip<W, 6>(q + r, keys, stride, head_dim, s + r, ahead);
  for (; r + 3 <= rows; r += 3) score_strip<W, 3>(q + r, keys, stride, head_dim, s + r, ahead);
  for (; r < rows; ++r) score_strip<W, 1>(q + r, keys, stride, head_dim, s + r, ahead);
}

// exp((s - max s) * scale) in place over s[0..n); returns the sum. s has room up to a multiple of kLanes.
SEER_INLINE float softmax_row(float* s, int64_t n, float scale) {
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = n; i < padded; ++i) s[i] = kMinusInf;
  float top[kLanes], sum[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) top[l] = kMinusInf, sum[l] = 0.0f;
  for (int64_t i = 0; i < padded; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) top[l] = s[i + l] > top[l] ? s[i + l] : top[l];
  float m = top[0];
  for (int64_t l = 1; l < kLanes; ++l) m = top[l] > m ? top[l] : m;
  for (int64_t i = 0; i < padded; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) {
      const float p = fast_exp((s[i + l] - m) * scale);
      s[i + l] = p;
      sum[l] += p;
    }
  return sum_lanes(sum);
}

// out[0..16 * N) += sum over j of p[j] * values[j], j in order.
template <int N>
SEER_INLINE void add_values(const float* p, const float* values, int64_t stride, int64_t count, float* out,
                            const float* ahead) {
  Vector<16> acc[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) acc[n] = load<16>(out + 16 * n);
  for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      acc[n] += p[j] * load<16>(values + j * stride + 16 * n);
      ask_ahead(ahead + j * stride + 16 * n);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) store<16>(out + 16 * n, acc[n]);
}

SEER_INLINE void add_values_any(const float* p, const float* values, int64_t count, int64_t head_dim, float* out,
                                const float* ahead) {
  int64_t d = 0;
  for (; d + 64 <= head_dim; d += 64) add_values<4>(p, values + d, head_dim, count, out + d, ahead + d);
  for (; d + 16 <= head_dim; d += 16) add_values<1>(p, values + d, head_dim, count, out + d, ahead + d);
  for (; d < head_dim; ++d)
    for (int64_t j = 0; j < count; ++j) out[d] += p[j] * values[j * head_dim + d];
}

// What attention needs for one tile: the query rows of a few consecutive tokens of one segment, KV head by KV head.
struct Tile {
  const float* const* q;       // [kv heads][rows] query vectors
  float* const* s;             // [kv heads][rows] scores, by position
  float* const* out;           // [kv heads][rows] results
  const int64_t* num_visible;  // [rows]
  int64_t rows;                // per KV head
  int64_t max_visible;
};

template <int W>
SEER_INLINE void score_table(const Tile& tile, const Shape& shape, const float* keys_of_block0, const int32_t* table,
                             float** s_at) {
  const int64_t tokens = shape.block_size, head_size = shape.head_dim * tokens;
  for (int64_t block = 0; block * tokens < tile.max_visible; ++block) {
    const float* keys = keys_of_block0 + table[block] * shape.block_floats();
    // Behind the last keys come the first values; they lie after the keys of their block.
    const bool more = (block + 1) * tokens < tile.max_visible;
    const float* next =
        keys_of_block0 + table[more ? block + 1 : 0] * shape.block_floats() + (more ? 0 : shape.half_size());
    for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
      for (int64_t offset = 0; offset < tokens; offset += W) {
        for (int64_t r = 0; r < tile.rows; ++r) s_at[r] = tile.s[h * tile.rows + r] + block * tokens + offset;
        score_rows<W>(tile.q + h * tile.rows, tile.rows, keys + h * head_size + offset, tokens, shape.head_dim, s_at,
                      next + h * head_size + offset);
      }
    }
  }
}

SEER_KERNEL void score_tile(const Tile& tile, const Shape& shape, const float* keys_of_block0, const int32_t* table,
                            float** s_at) {
  if (shape.block_size % 16 == 0) return score_table<16>(tile, shape, keys_of_block0, table, s_at);
  if (shape.block_size % 8 == 0) return score_table<8>(tile, shape, keys_of_block0, table, s_at);
  if (shape.block_size % 4 == 0) return score_table<4>(tile, shape, keys_of_block0, table, s_at);
  score_table<1>(tile, shape, keys_of_block0, table, s_at);
}

// Scores of one row against keys gathered as [head_dim][16].
SEER_KERNEL void score_path(const float* q, const float* keys, int64_t head_dim, float* s) {
  const float* qs[1] = {q};
  float* ss[1] = {s};
  score_strip<16, 1>(qs, keys, 16, head_dim, ss, keys);
}

SEER_KERNEL float softmax_one(float* s, int64_t n, float scale) { return softmax_row(s, n, scale); }

SEER_KERNEL void add_table_values(const Tile& tile, const Shape& shape, const float* values_of_block0,
                                  const int32_t* table, const float* behind) {
  const int64_t tokens = shape.block_size, head_size = shape.head_dim * tokens;
  for (int64_t block = 0; block * tokens < tile.max_visible; ++block) {
    const float* values = values_of_block0 + table[block] * shape.block_floats();
    const bool more = (block + 1) * tokens < tile.max_visible;
    const float* next = more ? values_of_block0 + table[block + 1] * shape.block_floats() : behind;
    for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
      for (int64_t r = 0; r < tile.rows; ++r) {
        const int64_t at = h * tile.rows + r, count = std::min(tokens, tile.num_visible[r] - block * tokens);
        if (count > 0)
          add_values_any(tile.s[at] + block * tokens, values + h * head_size, count, shape.head_dim, tile.out[at],
                         next + h * head_size);
      }
    }
  }
}

SEER_KERNEL void add_path_values(const float* p, const float* values, int64_t head_dim, float* out) {
  add_values_any(p, values, 1, head_dim, out, values);
}

SEER_KERNEL void rms_rows(const float* x, float* residual, const float* weight, float* out, int64_t rows, int64_t dim,
                          float eps) {
  for (int64_t r = 0; r < rows; ++r) {
    float* h = residual + r * dim;
    if (x != nullptr) {
      const float* add = x + r * dim;
      for (int64_t d = 0; d < dim; ++d) h[d] += add[d];
    }
    float lanes[kLanes] = {};
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) lanes[l] += h[d + l] * h[d + l];
    float tail = 0.0f;
    for (; d < dim; ++d) tail += h[d] * h[d];
    const float scale = 1.0f / std::sqrt((sum_lanes(lanes) + tail) / static_cast<float>(dim) + eps);
    float* o = out + r * dim;
    for (int64_t i = 0; i < dim; ++i) o[i] = h[i] * scale * weight[i];
  }
}

SEER_KERNEL void silu_rows(const float* gate_up, float* out, int64_t rows, int64_t inner) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* gate = gate_up + r * 2 * inner;
    const float* up = gate + inner;
    float* o = out + r * inner;
    for (int64_t i = 0; i < inner; ++i) o[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
  }
}

SEER_INLINE void rotate_head(float* head, const float* cosine, const float* sine, const float* norm, int64_t dim,
                             float eps) {
  if (norm != nullptr) {
    float lanes[kLanes] = {};
    for (int64_t d = 0; d < dim; ++d) lanes[d % kLanes] += head[d] * head[d];
    const float scale = 1.0f / std::sqrt(sum_lanes(lanes) / static_cast<float>(dim) + eps);
    for (int64_t d = 0; d < dim; ++d) head[d] = head[d] * scale * norm[d];
  }
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; ++d) {
    const float a = head[d], b = head[d + half];
    head[d] = a * cosine[d] - b * sine[d];
    head[d + half] = b * cosine[d] + a * sine[d];
  }
}

SEER_KERNEL void rotate_row(float* heads, int64_t count, const float* cosine, const float* sine, const float* norm,
                            int64_t dim, float eps) {
  for (int64_t h = 0; h < count; ++h) rotate_head(heads + h * dim, cosine, sine, norm, dim, eps);
}

SEER_KERNEL float log_sum_exp(const float* x, int64_t n) {
  float top[kLanes], sum[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) top[l] = kMinusInf, sum[l] = 0.0f;
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) top[l] = x[i + l] > top[l] ? x[i + l] : top[l];
  for (int64_t i = whole; i < n; ++i) top[0] = x[i] > top[0] ? x[i] : top[0];
  float m = top[0];
  for (int64_t l = 1; l < kLanes; ++l) m = top[l] > m ? top[l] : m;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) sum[l] += x[i + l] - m < -87.0f ? 0.0f : fast_exp(x[i + l] - m);
  for (int64_t i = whole; i < n; ++i) sum[0] += x[i] - m < -87.0f ? 0.0f : fast_exp(x[i] - m);
  return m + std::log(sum_lanes(sum));
}

struct Best {
  float score, second;
  int64_t token;
};

// The greatest of x[i] (+ noise) and the runner-up, lane by lane and then over the lanes; the lowest index among equals.
SEER_INLINE Best best_of(const float* x, int64_t n, uint32_t low, uint32_t high, bool noisy) {
  float best[kLanes], second[kLanes];
  int32_t token[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) best[l] = second[l] = kMinusInf, token[l] = -1;
  for (int64_t i = 0; i < n; i += kLanes) {
    float score[kLanes];
    const int64_t count = std::min(kLanes, n - i);
    if (count < kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) score[l] = l < count ? x[i + l] : kMinusInf;
    } else {
      for (int64_t l = 0; l < kLanes; ++l) score[l] = x[i + l];
    }
    if (noisy) {
      // Two logs are dear, and soon hardly any token can still come second in its lane: ask the bound first.
      float uniform[kLanes];
      int32_t hope = 0;
      for (int64_t l = 0; l < kLanes; ++l) {
        uniform[l] = uniform_of(static_cast<uint32_t>(i + l), low, high);
        hope |= score[l] + gumbel_bound(uniform[l]) > second[l];
      }
      if (hope == 0) continue;
      for (int64_t l = 0; l < kLanes; ++l) score[l] += gumbel_from(uniform[l]);
    }
    for (int64_t l = 0; l < kLanes; ++l) {
      const bool wins = score[l] > best[l];
      const float loser = wins ? best[l] : score[l];
      second[l] = loser > second[l] ? loser : second[l];
      token[l] = wins ? static_cast<int32_t>(i + l) : token[l];
      best[l] = wins ? score[l] : best[l];
    }
  }
  Best all{best[0], second[0], token[0]};
  for (int64_t l = 1; l < kLanes; ++l) {
    const bool wins = best[l] > all.score || (best[l] == all.score && token[l] < all.token && token[l] >= 0);
    const float loser = wins ? all.score : best[l];
    all.second = std::max(all.second, std::max(loser, wins ? second[l] : kMinusInf));
    if (wins) all.score = best[l], all.token = token[l];
  }
  return all;
}

SEER_KERNEL void find_best(const float* x, int64_t n, uint32_t low, uint32_t high, Best* out) {
  *out = best_of(x, n, low, high, true);
}

SEER_KERNEL void find_greatest(const float* x, int64_t n, Best* out) { *out = best_of(x, n, 0, 0, false); }

SEER_KERNEL void fill_gumbel(uint32_t low, uint32_t high, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = gumbel_from(uniform_of(static_cast<uint32_t>(i), low, high));
}

}  // namespace

void add_rms_norm(const float* x, float* residual, const float* weight, float* out, int64_t rows, int64_t dim,
                  float eps) {
  rms_rows(x, residual, weight, out, rows, dim, eps);
}

void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t inner) { silu_rows(gate_up, out, rows, inner); }

void Kernels::rotate_store(int64_t layer, float* qkv, const float* q_norm, const float* k_norm, float eps) {
  const int64_t dim = shape_.head_dim, tokens = shape_.block_size, heads = shape_.num_heads, kv = shape_.num_kv_heads;
  for (int64_t r = 0; r < step_.num_batched_tokens; ++r) {
    float* row = qkv + r * shape_.qkv_width();
    const float* cosine = step_.cosine + r * (dim / 2);
    const float* sine = step_.sine + r * (dim / 2);
    rotate_row(row, heads, cosine, sine, q_norm, dim, eps);
    rotate_row(row + heads * dim, kv, cosine, sine, k_norm, dim, eps);
    const int64_t block = step_.slots[r] / tokens, offset = step_.slots[r] % tokens;
    float* keys = half(block, layer, 0);
    float* values = half(block, layer, 1);
    const float* k = row + heads * dim;
    const float* v = k + kv * dim;
    for (int64_t h = 0; h < kv; ++h)
      for (int64_t d = 0; d < dim; ++d) keys[(h * dim + d) * tokens + offset] = k[h * dim + d];
    for (int64_t h = 0; h < kv; ++h)
      std::memcpy(values + (h * tokens + offset) * dim, v + h * dim, static_cast<size_t>(dim) * sizeof(float));
  }
}

void Kernels::attend(int64_t layer, const float* qkv, float* out) {
  constexpr int64_t kTileTokens = 8;  // scores of 72 rows for SmolLM2's nine heads: in L2 up to 3,000 positions
  for (int64_t seg = 0; seg < step_.num_segments; ++seg)
    for (int64_t first = step_.segment_rows[seg]; first < step_.segment_rows[seg + 1]; first += kTileTokens)
      attend_tile(layer, qkv, out, seg, first, std::min<int64_t>(first + kTileTokens, step_.segment_rows[seg + 1]));
}

// Tokens first..last of one segment. Row i of KV head h is token first + i / group, query head h * group + i % group.
void Kernels::attend_tile(int64_t layer, const float* qkv, float* out, int64_t seg, int64_t first, int64_t last) {
  const auto table_of = [&](int64_t s) { return step_.tables + step_.segment_seq_slots[s] * step_.table_width; };
  const int32_t* table = table_of(seg);
  // What is read after this tile: the first keys of the next segment, or of this one again.
  const bool ends = last == step_.segment_rows[seg + 1] && seg + 1 < step_.num_segments;
  const float* behind = half((ends ? table_of(seg + 1) : table)[0], layer, 0);
  const int64_t dim = shape_.head_dim, tokens = shape_.block_size, group = shape_.group(), kv = shape_.num_kv_heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const int64_t rows = (last - first) * group;
  int64_t max_visible = 0, max_path = 0;
  for (int64_t r = first; r < last; ++r) {
    max_visible = std::max<int64_t>(max_visible, step_.num_visible[r]);
    max_path = std::max<int64_t>(max_path, step_.path_start[r + 1] - step_.path_start[r]);
  }
  // Room for the whole last block, for the path, and for padding to whole lanes.
  const int64_t room = (max_visible + tokens + max_path + 2 * kLanes) / kLanes * kLanes;
  const size_t count = static_cast<size_t>(kv * rows);
  if (scores_.size() < count * static_cast<size_t>(room)) scores_.resize(count * static_cast<size_t>(room));
  q_.resize(count), s_.resize(count), o_.resize(count), s_at_.resize(count), visible_.resize(static_cast<size_t>(rows));
  for (int64_t i = 0; i < kv * rows; ++i) {
    const int64_t h = i / rows, r = first + i % rows / group, head = h * group + i % group;
    q_[i] = qkv + r * shape_.qkv_width() + head * dim;
    o_[i] = out + r * shape_.num_heads * dim + head * dim;
    s_[i] = scores_.data() + i * room;
    visible_[i % rows] = step_.num_visible[r];
    std::fill(o_[i], o_[i] + dim, 0.0f);
  }
  const Tile tile{q_.data(), s_.data(), o_.data(), visible_.data(), rows, max_visible};
  score_tile(tile, shape_, half(0, layer, 0), table, s_at_.data());
  sums_.resize(count);
  for (int64_t i = 0; i < kv * rows; ++i) {
    const int64_t r = first + i % rows / group, seen = visible_[i % rows];
    const int64_t depth = step_.path_start[r + 1] - step_.path_start[r];
    if (depth > 0) score_ancestors(layer, i / rows, q_[i], step_.path_slots + step_.path_start[r], depth, s_[i] + seen);
    sums_[i] = softmax_one(s_[i], seen + depth, scale);
  }
  add_table_values(tile, shape_, half(0, layer, 1), table, behind);
  for (int64_t i = 0; i < kv * rows; ++i) {
    const int64_t h = i / rows, r = first + i % rows / group;
    for (int64_t j = step_.path_start[r]; j < step_.path_start[r + 1]; ++j) {
      const int64_t slot = step_.path_slots[j];
      const float* value = half(slot / tokens, layer, 1) + (h * tokens + slot % tokens) * dim;
      add_path_values(s_[i] + visible_[i % rows] + (j - step_.path_start[r]), value, dim, o_[i]);
    }
    const float share = 1.0f / sums_[i];
    for (int64_t d = 0; d < dim; ++d) o_[i][d] *= share;
  }
}

// Scores of one query row against the keys of its ancestors, gathered so that the same code scores them.
void Kernels::score_ancestors(int64_t layer, int64_t head, const float* q, const int64_t* path, int64_t depth,
                              float* s) {
  const int64_t dim = shape_.head_dim, tokens = shape_.block_size;
  path_keys_.resize(static_cast<size_t>(dim * kLanes));
  for (int64_t start = 0; start < depth; start += kLanes) {
    const int64_t count = std::min(kLanes, depth - start);
    for (int64_t j = 0; j < count; ++j) {
      const float* keys = half(path[start + j] / tokens, layer, 0) + head * dim * tokens + path[start + j] % tokens;
      for (int64_t d = 0; d < dim; ++d) path_keys_[d * kLanes + j] = keys[d * tokens];
    }
    float scores[kLanes];
    score_path(q, path_keys_.data(), dim, scores);
    std::copy(scores, scores + count, s + start);
  }
}

void Kernels::move(const int64_t* from, const int64_t* to, int64_t count) {
  const int64_t dim = shape_.head_dim, tokens = shape_.block_size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t a = from[i] % tokens, b = to[i] % tokens;
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      const float* keys = half(from[i] / tokens, layer, 0);
      float* new_keys = half(to[i] / tokens, layer, 0);
      for (int64_t d = 0; d < shape_.num_kv_heads * dim; ++d) new_keys[d * tokens + b] = keys[d * tokens + a];
      const float* values = half(from[i] / tokens, layer, 1);
      float* new_values = half(to[i] / tokens, layer, 1);
      for (int64_t h = 0; h < shape_.num_kv_heads; ++h)
        std::memcpy(new_values + (h * tokens + b) * dim, values + (h * tokens + a) * dim,
                    static_cast<size_t>(dim) * sizeof(float));
    }
  }
}

Sampled sample(const float* raw, const float* processed, int64_t vocab, uint64_t seed, uint64_t position, bool greedy) {
  const uint64_t key = noise_key(seed, position);
  Best best;
  if (greedy) {
    find_greatest(processed, vocab, &best);
  } else {
    find_best(processed, vocab, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), &best);
  }
  if (best.token < 0) {  // every logit is NaN or -inf, and raw[-1] is not ours to read
    const float none = std::numeric_limits<float>::quiet_NaN();
    return {-1, none, none, none};
  }
  const float raw_total = log_sum_exp(raw, vocab);
  Sampled sampled{best.token, 0.0f, raw[best.token] - raw_total, best.score - best.second};
  if (!greedy)
    sampled.logprob = processed == raw ? sampled.raw_logprob : processed[best.token] - log_sum_exp(processed, vocab);
  return sampled;
}

void gumbel(uint64_t seed, uint64_t position, float* out, int64_t vocab) {
  const uint64_t key = noise_key(seed, position);
  fill_gumbel(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), out, vocab);
}

}  // namespace seer::engine
