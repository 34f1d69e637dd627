// SPDX-License-Identifier: Apache-2.0
// The engine's row-wise arithmetic against plain loops in double precision; and, bit by bit, that a row's result depends
// on that row alone and that a draft node is computed as plain decoding would have.
#include "engine/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "testing/check.h"

using namespace seer::engine;

namespace {

using Floats = std::vector<float>;

Floats random_floats(std::mt19937& rng, int64_t count, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  Floats values(static_cast<size_t>(count));
  for (float& value : values) value = normal(rng);
  return values;
}

bool is_close(double a, double b) { return std::abs(a - b) <= 2e-5 * (1.0 + std::abs(b)); }

int64_t up_to(std::mt19937& rng, int64_t least, int64_t most) {
  return least + static_cast<int64_t>(rng() % static_cast<uint64_t>(most - least + 1));
}

// ---- attention

// A step with everything it points to: several sequences with shuffled blocks; the last rows of each may be draft nodes,
// whose KV is in scratch blocks.
struct Batch {
  Shape shape;
  Floats cache, qkv, cosine, sine;
  std::vector<int32_t> segment_rows{0}, segment_seq_slots, tables, num_visible, path_start{0};
  std::vector<int64_t> slots, path_slots;
  int64_t table_width = 0, num_segments = 0;

  int64_t num_rows() const { return static_cast<int64_t>(num_visible.size()); }
  int64_t slot(int64_t sequence, int64_t position) const {
    const int64_t tokens = shape.block_size;
    return tables[static_cast<size_t>(sequence * table_width + position / tokens)] * tokens + position % tokens;
  }
  Step step() const {
    Step step;
    step.num_batched_tokens = num_rows();
    step.num_segments = num_segments;
    step.segment_rows = segment_rows.data();
    step.segment_seq_slots = segment_seq_slots.data();
    step.tables = tables.data();
    step.table_width = table_width;
    step.num_visible = num_visible.data();
    step.slots = slots.data();
    step.path_start = path_start.data();
    step.path_slots = path_slots.data();
    step.cosine = cosine.data();
    step.sine = sine.data();
    return step;
  }
  float key(int64_t at, int64_t layer, int64_t head, int64_t d) const {
    const int64_t tokens = shape.block_size;
    return cache[static_cast<size_t>(at / tokens * shape.block_floats() + layer * 2 * shape.half_size() +
                                     (head * shape.head_dim + d) * tokens + at % tokens)];
  }
  float value(int64_t at, int64_t layer, int64_t head, int64_t d) const {
    const int64_t tokens = shape.block_size;
    return cache[static_cast<size_t>(at / tokens * shape.block_floats() + (layer * 2 + 1) * shape.half_size() +
                                     (head * tokens + at % tokens) * shape.head_dim + d)];
  }
};

Batch random_batch(std::mt19937& rng, int64_t block_size, int64_t head_dim) {
  Batch batch;
  const int64_t num_kv_heads = up_to(rng, 1, 3);
  batch.shape = {2, num_kv_heads * up_to(rng, 1, 3), num_kv_heads, head_dim, block_size};
  const int64_t num_sequences = up_to(rng, 1, 3), max_tokens = 40;
  batch.table_width = (max_tokens + block_size - 1) / block_size;
  const int64_t num_blocks = (num_sequences + 1) * batch.table_width;  // those beyond the tables are scratch
  batch.tables.resize(static_cast<size_t>(num_blocks));
  std::iota(batch.tables.begin(), batch.tables.end(), 0);
  std::shuffle(batch.tables.begin(), batch.tables.end(), rng);
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int64_t num_plain = up_to(rng, 1, 20), num_before = up_to(rng, 0, max_tokens - num_plain - 1);
    for (int64_t i = 0; i < num_plain; ++i) {
      batch.num_visible.push_back(static_cast<int32_t>(num_before + i + 1));
      batch.slots.push_back(batch.slot(sequence, num_before + i));
      batch.path_start.push_back(batch.path_start.back());
    }
    // A chain of draft nodes below the last plain row; more than are scored at once.
    const int64_t num_nodes = up_to(rng, 0, std::min<int64_t>(36, max_tokens / num_sequences));
    for (int64_t node = 0; node < num_nodes; ++node) {
      batch.num_visible.push_back(static_cast<int32_t>(num_before + num_plain));
      const int64_t scratch = num_sequences * batch.table_width * block_size;  // in places of `tables`, not in slots
      const int64_t place = scratch + sequence * (max_tokens / num_sequences) + node;
      batch.slots.push_back(batch.slot(0, place));
      for (int64_t above = node; above >= 0; --above)
        batch.path_slots.push_back(batch.slots[batch.slots.size() - 1 - static_cast<size_t>(above)]);
      batch.path_start.push_back(static_cast<int32_t>(batch.path_slots.size()));
    }
    batch.segment_rows.push_back(static_cast<int32_t>(batch.num_rows()));
    batch.segment_seq_slots.push_back(static_cast<int32_t>(sequence));
  }
  batch.num_segments = num_sequences;
  batch.cache = random_floats(rng, num_blocks * batch.shape.block_floats());
  batch.qkv = random_floats(rng, batch.num_rows() * batch.shape.qkv_width());
  for (int64_t i = 0; i < batch.num_rows() * head_dim / 2; ++i) {
    const float angle = std::uniform_real_distribution<float>(0, 6)(rng);
    batch.cosine.push_back(std::cos(angle));
    batch.sine.push_back(std::sin(angle));
  }
  return batch;
}

// The slots a row sees, in order.
std::vector<int64_t> seen_by(const Batch& batch, int64_t sequence, int64_t row) {
  std::vector<int64_t> seen;
  const auto r = static_cast<size_t>(row);
  for (int64_t position = 0; position < batch.num_visible[r]; ++position)
    seen.push_back(batch.slot(sequence, position));
  for (int32_t j = batch.path_start[r]; j < batch.path_start[r + 1]; ++j)
    seen.push_back(batch.path_slots[static_cast<size_t>(j)]);
  return seen;
}

void attention_is_that_of_plain_loops(Batch batch, int64_t layer) {
  const Shape& shape = batch.shape;
  Kernels kernels(shape, batch.cache.data());
  kernels.begin(batch.step());
  Floats out(static_cast<size_t>(batch.num_rows() * shape.num_heads * shape.head_dim), NAN);
  kernels.attend(layer, batch.qkv.data(), out.data());
  for (int64_t sequence = 0; sequence < batch.num_segments; ++sequence) {
    const auto s = static_cast<size_t>(sequence);
    for (int64_t row = batch.segment_rows[s]; row < batch.segment_rows[s + 1]; ++row) {
      const std::vector<int64_t> seen = seen_by(batch, sequence, row);
      for (int64_t head = 0; head < shape.num_heads; ++head) {
        const float* q = batch.qkv.data() + row * shape.qkv_width() + head * shape.head_dim;
        const int64_t kv_head = head / shape.group();
        std::vector<double> weights;
        double total = 0;
        for (const int64_t at : seen) {
          double score = 0;
          for (int64_t d = 0; d < shape.head_dim; ++d) score += double(q[d]) * batch.key(at, layer, kv_head, d);
          weights.push_back(std::exp(score / std::sqrt(double(shape.head_dim))));
          total += weights.back();
        }
        for (int64_t d = 0; d < shape.head_dim; ++d) {
          double expected = 0;
          for (size_t i = 0; i < seen.size(); ++i)
            expected += weights[i] * batch.value(seen[i], layer, kv_head, d) / total;
          CHECK(is_close(out[static_cast<size_t>((row * shape.num_heads + head) * shape.head_dim + d)], expected));
        }
      }
    }
  }
}

// Row by row on its own, and with its ancestors' KV where plain decoding would have stored it: the same bits.
void neither_neighbours_nor_drafting_change_a_bit(Batch batch) {
  const Shape& shape = batch.shape;
  const int64_t width = shape.num_heads * shape.head_dim;
  Floats together(static_cast<size_t>(batch.num_rows() * width));
  Kernels kernels(shape, batch.cache.data());
  kernels.begin(batch.step());
  kernels.attend(1, batch.qkv.data(), together.data());
  for (int64_t sequence = 0; sequence < batch.num_segments; ++sequence) {
    const auto s = static_cast<size_t>(sequence);
    for (int64_t row = batch.segment_rows[s]; row < batch.segment_rows[s + 1]; ++row) {
      const auto r = static_cast<size_t>(row);
      Batch alone = batch;
      const int64_t depth = batch.path_start[r + 1] - batch.path_start[r];
      // One table wide enough for the path, which moves into blocks appended to the cache.
      const int64_t num_seen = batch.num_visible[r] + depth, tokens = shape.block_size;
      const int64_t num_blocks = (num_seen + tokens - 1) / tokens,
                    first_new = int64_t(batch.cache.size()) / shape.block_floats();
      alone.cache.resize(static_cast<size_t>((first_new + num_blocks) * shape.block_floats()));
      alone.tables.clear();
      std::vector<int64_t> to;
      for (int64_t block = 0; block < num_blocks; ++block)
        alone.tables.push_back(static_cast<int32_t>(first_new + block));
      for (int64_t i = 0; i < num_seen; ++i) to.push_back(first_new * tokens + i);
      alone.table_width = num_blocks;
      alone.num_segments = 1;
      alone.segment_rows = {0, 1};
      alone.segment_seq_slots = {0};
      alone.num_visible = {static_cast<int32_t>(num_seen)};
      alone.path_start = {0, 0};
      Kernels plain(shape, alone.cache.data());
      plain.move(seen_by(batch, sequence, row).data(), to.data(), num_seen);
      plain.begin(alone.step());
      Floats out(static_cast<size_t>(width));
      plain.attend(1, batch.qkv.data() + row * shape.qkv_width(), out.data());
      CHECK(std::memcmp(out.data(), together.data() + row * width, static_cast<size_t>(width) * sizeof(float)) == 0);
    }
  }
}

void rotation_stores_keys_and_values(std::mt19937& rng, Batch batch, bool normed) {
  const Shape& shape = batch.shape;
  const int64_t dim = shape.head_dim, layer = up_to(rng, 0, 1), half = dim / 2;
  const Floats q_norm = random_floats(rng, dim), k_norm = random_floats(rng, dim), before = batch.qkv;
  const Floats cache_before = batch.cache;
  Kernels kernels(shape, batch.cache.data());
  kernels.begin(batch.step());
  kernels.rotate_store(layer, batch.qkv.data(), normed ? q_norm.data() : nullptr, normed ? k_norm.data() : nullptr,
                       1e-5f);
  for (int64_t row = 0; row < batch.num_rows(); ++row) {
    for (int64_t head = 0; head < shape.num_heads + 2 * shape.num_kv_heads; ++head) {
      const int64_t kv_head = (head - shape.num_heads) % shape.num_kv_heads;
      const bool is_query = head < shape.num_heads, is_value = head >= shape.num_heads + shape.num_kv_heads;
      const size_t at = static_cast<size_t>(row * shape.qkv_width() + head * dim);
      double squares = 0;
      for (int64_t d = 0; d < dim; ++d) squares += double(before[at + size_t(d)]) * before[at + size_t(d)];
      const double scale = 1 / std::sqrt(squares / double(dim) + 1e-5);
      const auto normalised = [&](int64_t d) {
        const double raw = before[at + size_t(d)];
        return normed ? raw * scale * (is_query ? q_norm : k_norm)[size_t(d)] : raw;
      };
      for (int64_t d = 0; d < dim; ++d) {
        const double cosine = batch.cosine[size_t(row * half + d % half)],
                     sine = batch.sine[size_t(row * half + d % half)];
        const double turned = d < half ? normalised(d) * cosine - normalised(d + half) * sine
                                       : normalised(d) * cosine + normalised(d - half) * sine;
        const float now = batch.qkv[at + size_t(d)];
        CHECK(is_close(now, is_value ? before[at + size_t(d)] : turned));
        if (is_query) continue;
        const int64_t slot = batch.slots[size_t(row)];
        CHECK((is_value ? batch.value(slot, layer, kv_head, d) : batch.key(slot, layer, kv_head, d)) == now);
      }
    }
  }
  size_t num_changed = 0;
  for (size_t i = 0; i < batch.cache.size(); ++i) num_changed += batch.cache[i] != cache_before[i];
  CHECK(num_changed <= static_cast<size_t>(batch.num_rows() * 2 * shape.num_kv_heads * dim));
}

void moves_copy_every_layer(std::mt19937& rng, Batch batch) {
  const Shape& shape = batch.shape;
  const int64_t num_slots = int64_t(batch.tables.size()) * shape.block_size;
  std::vector<int64_t> from{up_to(rng, 0, num_slots - 1)}, to{up_to(rng, 0, num_slots - 1)};
  from.push_back(to[0]), to.push_back(up_to(rng, 0, num_slots - 1));  // pair after pair: what came is what goes on
  const Batch before = batch;
  Kernels(shape, batch.cache.data()).move(from.data(), to.data(), 2);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int64_t source = slot == to[0] || slot == to[1] ? from[0] : slot;
    for (int64_t layer = 0; layer < shape.num_layers; ++layer)
      for (int64_t head = 0; head < shape.num_kv_heads; ++head)
        for (int64_t d = 0; d < shape.head_dim; ++d) {
          CHECK(batch.key(slot, layer, head, d) == before.key(source, layer, head, d));
          CHECK(batch.value(slot, layer, head, d) == before.value(source, layer, head, d));
        }
  }
}

// ---- rows

void norms_and_gates_are_those_of_plain_loops(std::mt19937& rng, int64_t rows, int64_t dim, bool adds) {
  const Floats x = random_floats(rng, rows * dim), weight = random_floats(rng, dim),
               before = random_floats(rng, rows * dim);
  Floats residual = before, out(static_cast<size_t>(rows * dim), NAN);
  add_rms_norm(adds ? x.data() : nullptr, residual.data(), weight.data(), out.data(), rows, dim, 1e-5f);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const auto at = static_cast<size_t>(row * dim + d);
      CHECK(residual[at] == (adds ? before[at] + x[at] : before[at]));
      squares += double(residual[at]) * residual[at];
    }
    for (int64_t d = 0; d < dim; ++d) {
      const auto at = static_cast<size_t>(row * dim + d);
      CHECK(is_close(out[at], residual[at] / std::sqrt(squares / double(dim) + 1e-5) * weight[static_cast<size_t>(d)]));
    }
  }
  Floats gate_up = random_floats(rng, rows * 2 * dim, 10.0f), gated(static_cast<size_t>(rows * dim), NAN);
  gate_up[0] = -200.0f, gate_up[static_cast<size_t>(dim) - 1] = 200.0f;
  silu_mul(gate_up.data(), gated.data(), rows, dim);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t d = 0; d < dim; ++d) {
      const double gate = gate_up[size_t(row * 2 * dim + d)], up = gate_up[size_t(row * 2 * dim + dim + d)];
      CHECK(is_close(gated[size_t(row * dim + d)], gate / (1 + std::exp(-gate)) * up));
    }
}

// ---- samples

double log_of_sum(const Floats& logits) {
  double total = 0;
  for (const float logit : logits) total += std::exp(double(logit));
  return std::log(total);
}

void samples_are_the_greatest_of_logits_and_noise(std::mt19937& rng, int64_t vocab) {
  const Floats raw = random_floats(rng, vocab, 3.0f);
  Floats processed = raw, noise(static_cast<size_t>(vocab));
  for (float& logit : processed) logit = rng() % 4 == 0 ? -std::numeric_limits<float>::infinity() : logit * 1.5f;
  processed[rng() % processed.size()] = 0.5f;
  if (rng() % 2 == 0) processed[rng() % processed.size()] = processed[rng() % processed.size()] = 50.0f;  // a tie
  const uint64_t seed = rng(), position = rng() % 1000;
  gumbel(seed, position, noise.data(), vocab);
  for (const bool greedy : {false, true}) {
    for (const Floats* source : {&raw, static_cast<const Floats*>(&processed)}) {
      const Floats& from = *source;
      Floats scores = from;
      for (size_t v = 0; v < scores.size() && !greedy; ++v) scores[v] += noise[v];
      const auto best = std::max_element(scores.begin(), scores.end());  // the first of equals
      const auto token = static_cast<size_t>(best - scores.begin());
      const float top = *best;
      scores.erase(best);
      const Sampled sampled = sample(raw.data(), from.data(), vocab, seed, position, greedy);
      CHECK(sampled.token == static_cast<int64_t>(token));
      CHECK(from[token] > -std::numeric_limits<float>::infinity());
      CHECK(is_close(sampled.raw_logprob, raw[token] - log_of_sum(raw)));
      CHECK(is_close(sampled.logprob, greedy ? 0.0 : from[token] - log_of_sum(from)));
      if (!scores.empty()) CHECK(sampled.margin == top - *std::max_element(scores.begin(), scores.end()));
    }
  }
}

// Tokens whose noise cannot bring them to the front are left out by a bound on it, 16 at a time. Here 32 are level, and of
// the next 16 one alone has a chance.
void a_token_that_wins_narrowly_is_found(std::mt19937& rng) {
  constexpr size_t kLevel = 32, kVocab = 48;
  const uint64_t seed = rng(), position = rng() % 1000;
  Floats noise(kVocab);
  gumbel(seed, position, noise.data(), kVocab);
  for (size_t winner = kLevel; winner < kVocab; ++winner) {
    Floats logits(kVocab, -std::numeric_limits<float>::infinity());
    for (size_t v = 0; v < kLevel; ++v) logits[v] = 5.0f - noise[v];
    logits[winner] = 5.01f - noise[winner];
    CHECK(sample(logits.data(), logits.data(), kVocab, seed, position, false).token == static_cast<int64_t>(winner));
  }
}

// Nothing is read outside `raw` (the sanitizers look), and the sample says that there is no probability.
void logits_without_probabilities_give_no_token(std::mt19937& rng, int64_t vocab) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  const Floats fine = random_floats(rng, vocab, 3.0f);
  for (const bool greedy : {false, true}) {
    for (const float value : {kNan, -kInf}) {
      const Floats none(static_cast<size_t>(vocab), value);
      for (const Floats* raw : {&none, &fine}) {
        const Sampled sampled = sample(raw->data(), none.data(), vocab, rng(), rng() % 1000, greedy);
        CHECK(sampled.token == -1);
        CHECK(std::isnan(sampled.logprob) && std::isnan(sampled.raw_logprob));
      }
    }
    for (const float value : {kNan, kInf}) {
      Floats spoiled = fine;
      spoiled[rng() % spoiled.size()] = value;
      const Sampled sampled = sample(spoiled.data(), spoiled.data(), vocab, rng(), rng() % 1000, greedy);
      CHECK(sampled.token >= -1 && sampled.token < vocab);
      CHECK(std::isnan(sampled.raw_logprob));
    }
  }
}

void noise_is_gumbel_and_differs_by_seed_and_position() {
  constexpr int64_t kCount = 200000;
  Floats noise(kCount), other(kCount);
  gumbel(3, 4, noise.data(), kCount);
  double sum = 0, squares = 0;
  for (const float value : noise) sum += value, squares += double(value) * value;
  const double mean = sum / kCount;
  CHECK(std::abs(mean - 0.5772) < 0.015);                           // Euler's constant
  CHECK(std::abs(squares / kCount - mean * mean - 1.6449) < 0.04);  // pi^2 / 6
  for (const auto& [seed, position] : {std::pair<uint64_t, uint64_t>{4, 3}, {3, 5}, {4, 4}}) {
    gumbel(seed, position, other.data(), kCount);
    int64_t num_equal = 0;
    for (size_t i = 0; i < kCount; ++i) num_equal += noise[i] == other[i];
    CHECK(num_equal < 100);
  }
  gumbel(3, 4, other.data(), 100);
  CHECK(std::equal(other.begin(), other.begin() + 100, noise.begin()));
}

}  // namespace

int main() {
  std::mt19937 rng(static_cast<unsigned>(seer::testing::seed()));
  for (const int64_t block_size : {1, 3, 4, 8, 16, 32}) {
    for (const int64_t head_dim : {2, 16, 30, 64, 80}) {
      const Batch batch = random_batch(rng, block_size, head_dim);
      attention_is_that_of_plain_loops(batch, rng() % 2);
      neither_neighbours_nor_drafting_change_a_bit(batch);
      rotation_stores_keys_and_values(rng, batch, rng() % 2);
      moves_copy_every_layer(rng, batch);
    }
  }
  for (const int64_t dim : {1, 15, 16, 17, 100})
    norms_and_gates_are_those_of_plain_loops(rng, up_to(rng, 1, 4), dim, rng() % 2);
  for (int64_t vocab = 1; vocab < 80; ++vocab) samples_are_the_greatest_of_logits_and_noise(rng, vocab);
  for (int round = 0; round < 20; ++round) samples_are_the_greatest_of_logits_and_noise(rng, up_to(rng, 1000, 5000));
  for (int round = 0; round < 20; ++round) a_token_that_wins_narrowly_is_found(rng);
  for (int64_t vocab = 1; vocab < 80; ++vocab) logits_without_probabilities_give_no_token(rng, vocab);
  noise_is_gumbel_and_differs_by_seed_and_position();
  return seer::testing::passed("kernels");
}
