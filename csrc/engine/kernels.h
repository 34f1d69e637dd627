// SPDX-License-Identifier: Apache-2.0
// The embedded engine's CPU arithmetic, all of it but the matrix products.
//
// Purpose: one decoder layer on a CPU spends its time in matrix products (product.h) and in the small row-wise work
// around them. The latter is here, so that a step costs a few calls per layer and, above all, so that it has one fixed
// order of operations.
//
// Invariants
//   1. A row's result depends on that row's inputs only: not on how many rows the call has, where the row stands
//      among them, or how its neighbours are grouped. Every sum runs in an order fixed by the index summed over.
//   2. A draft node's attention adds the same numbers in the same order as the plain decoding of the same tokens:
//      its ancestors' keys, wherever they are stored, are scored by the same code and take the places they would
//      have had in the sequence.
//   3. Nothing here allocates per call beyond scratch that grows to its largest size and stays.
//
// All pointers are to contiguous float32 (or the stated integer type) memory owned by the caller and alive for the
// call; step arrays (see Step) for all calls until the next `begin`.
#pragma once

#include <cstdint>
#include <vector>

namespace seer::engine {

// Fixed while an engine lives. The cache is [block][layer][key, value][kv head][...]; a block's bytes are contiguous,
// so a block is exported and imported by one copy. Keys are stored [head_dim][block_size], so that the scores of
// consecutive positions are one vector; values are stored [block_size][head_dim].
struct Shape {
  int64_t num_layers;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;

  int64_t half_size() const { return num_kv_heads * head_dim * block_size; }
  int64_t block_floats() const { return num_layers * 2 * half_size(); }
  int64_t qkv_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  int64_t group() const { return num_heads / num_kv_heads; }
};

// One forward pass, described row by row. A segment is the consecutive rows of one sequence.
struct Step {
  int64_t num_batched_tokens = 0;
  int64_t num_segments = 0;
  const int32_t* segment_rows = nullptr;       // [num_segments + 1] first row of each segment, then num_batched_tokens
  const int32_t* segment_seq_slots = nullptr;  // [num_segments] the sequence's row of `tables`
  const int32_t* tables = nullptr;             // [seq_slots][table_width] cache blocks of each sequence, in order
  int64_t table_width = 0;
  // [num_batched_tokens] leading positions of the table the row sees, itself included when its KV is stored there
  const int32_t* num_visible = nullptr;
  const int64_t* slots = nullptr;       // [num_batched_tokens] where the row's KV goes: block * block_size + offset
  const int32_t* path_start = nullptr;  // [num_batched_tokens + 1] into path_slots
  // Slots of a draft node's ancestors in order, itself last; the root, whose KV is in the table, left out
  const int64_t* path_slots = nullptr;
  const float* cosine = nullptr;  // [num_batched_tokens][head_dim / 2] rotary angles of each row's position
  const float* sine = nullptr;
};

class Kernels {
 public:
  Kernels(Shape shape, float* cache) : shape_(shape), cache_(cache) {}

  void begin(const Step& step) { step_ = step; }

  // Normalise and rotate the queries and keys of qkv [rows][qkv_width] in place; store keys and values in the cache.
  // `q_norm` and `k_norm` (Qwen3) are null elsewhere.
  void rotate_store(int64_t layer, float* qkv, const float* q_norm, const float* k_norm, float eps);

  // out [rows][num_heads * head_dim] = softmax attention of every row over what it sees.
  void attend(int64_t layer, const float* qkv, float* out);

  // Copy the KV of every layer from one slot to another, pair after pair.
  void move(const int64_t* from, const int64_t* to, int64_t count);

 private:
  float* half(int64_t block, int64_t layer, int64_t which) const {
    return cache_ + block * shape_.block_floats() + (layer * 2 + which) * shape_.half_size();
  }

  void attend_tile(int64_t layer, const float* qkv, float* out, int64_t seg, int64_t first, int64_t last);
  void score_ancestors(int64_t layer, int64_t head, const float* q, const int64_t* path, int64_t depth, float* s);

  Shape shape_;
  float* cache_;
  Step step_;
  // Scratch of attend_tile: one entry per KV head and row, except `visible_`, one per row.
  std::vector<float> scores_, sums_, path_keys_;
  std::vector<const float*> q_;
  std::vector<float*> s_, o_, s_at_;
  std::vector<int64_t> visible_;
};

// residual += x (unless `x` is null); out = residual / rms(residual) * weight.
void add_rms_norm(const float* x, float* residual, const float* weight, float* out, int64_t rows, int64_t dim,
                  float eps);

// out [rows][inner] = silu(gate) * up, with gate_up [rows][2 * inner].
void silu_mul(const float* gate_up, float* out, int64_t rows, int64_t inner);

// What was sampled from one row of logits.
struct Sampled {
  int64_t token;
  float logprob;      // under the processed distribution
  float raw_logprob;  // under softmax(raw)
  float margin;       // how far the runner-up's perturbed logit was behind: small means a near-tie
};

// Gumbel-max: argmax of processed[v] + noise(seed, position, v). `processed` may equal `raw`; -inf is never sampled.
// `greedy` samples the argmax of `processed` without noise. The token is -1 if all of `processed` is NaN or -inf; a NaN or
// +inf in `raw` makes the raw log-probability NaN.
Sampled sample(const float* raw, const float* processed, int64_t vocab, uint64_t seed, uint64_t position, bool greedy);

// The noise itself, for tests and for other implementations to compare with.
void gumbel(uint64_t seed, uint64_t position, float* out, int64_t vocab);

}  // namespace seer::engine
