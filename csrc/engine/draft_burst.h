// SPDX-License-Identifier: Apache-2.0
// Several verification steps of the same chunks with nothing but this between them: each step's rows are laid out, the
// trees walked down by what was sampled, and what became final is kept until Python asks.
//
// Why native: Python needs 20 to 30 microseconds for a chunk and step, during which the device idles; this needs less
// than one. engine/local/uniform_rows.py and tree_walk.py define rows and walks; tests compare this with them.
//
// Invariants
//   1. A chunk that has ended has no rows: those of the others come in the order in which they were added.
//   2. Between `lay_out` and `settle` the trees are those that were laid out.
//   3. A move of KV stays due until `lay_out` or `take_moves` has handed it out.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace seer::engine {

constexpr int kMaxNodes = 31;

struct BurstGeometry {
  std::int64_t block_size;
  std::int64_t first_scratch_slot;
  std::int32_t spare_seq_slot;
  std::int32_t spare_slot;
};

// Row i belongs to the i-th chunk added: counts[i] nodes, a parent being an earlier column or -1.
struct TreeTable {
  const std::int32_t* tokens;
  const std::int32_t* parents;
  const std::int32_t* counts;
  std::int64_t width;
};

struct BlockTables {
  const std::int32_t* blocks;  // [seq_slots][width]
  std::int64_t width;
};

struct BurstChunk {
  std::int32_t seq_slot;
  std::int64_t root;  // position of the last known token, whose KV the next step computes
  std::int32_t token;
  std::int64_t remaining;
  std::vector<std::int32_t> stop_ids;
  bool stopped = false;
  std::int32_t limit = 0;  // nodes its next tree may have
  std::int64_t drafted = 0, accepted = 0;
  std::vector<std::int32_t> tokens;
  std::vector<float> logprobs, raw_logprobs;

  bool live() const { return !stopped && remaining > 0; }
  bool stops_at(std::int32_t token) const {
    return std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end();
  }
};

class DraftBurst {
 public:
  explicit DraftBurst(BurstGeometry geometry) : geometry_(geometry) {}

  void add(BurstChunk chunk);

  std::int64_t size() const { return static_cast<std::int64_t>(chunks_.size()); }
  std::int64_t num_live() const;
  const BurstChunk& chunk(std::size_t index) const { return chunks_.at(index); }
  std::int64_t num_laid_out() const { return num_live() * tokens_per_chunk_; }
  std::int64_t most_tokens() const { return num_live() + static_cast<std::int64_t>(nodes_.size()); }
  std::int64_t num_near_ties() const { return num_near_ties_; }

  // How many nodes each chunk's tree may have, at most most[i]: one fewer than it may still say, for the root's sample
  // comes on top.
  void limit(const std::int32_t* most, std::int32_t* out);

  // Writes [6][num_chunks * tokens_per_chunk] rows and [2][max_moves] moves of KV that are due before the step; the rest of
  // them are -1. False, and nothing is handed out, where more moves are due than there is room for.
  bool lay_out(const TreeTable& trees, const BlockTables& tables, std::int64_t num_chunks,
               std::int64_t tokens_per_chunk, std::int32_t* rows, std::int64_t max_moves, std::int32_t* moves);

  // Walks down by `sampled` [rows][4]: the token's bits, its log-probability, the raw one, its lead over the second.
  // Appends the tokens of each chunk to `tokens`, chunk by chunk, offsets[i] to offsets[i + 1].
  void settle(const float* sampled, const BlockTables& tables, float near_tie, std::int32_t* tokens,
              std::int64_t* offsets);

  // Moves of KV that are due, sources and targets.
  std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> take_moves();

  // For each node, in the order in which they are drafted: how often a tree might have had it, and how often it was
  // accepted.
  const std::array<std::int64_t, kMaxNodes>& tried() const { return tried_; }
  const std::array<std::int64_t, kMaxNodes>& taken() const { return taken_; }

 private:
  struct Node {
    std::int32_t token, parent, slot, depth;
    std::uint32_t seen;  // ancestors and itself
    bool on_first_path;
  };

  std::int64_t slot(const BurstChunk& chunk, const BlockTables& tables, std::int64_t position) const {
    const std::int64_t block = tables.blocks[chunk.seq_slot * tables.width + position / geometry_.block_size];
    return block * geometry_.block_size + position % geometry_.block_size;
  }

  BurstGeometry geometry_;
  std::vector<BurstChunk> chunks_;
  std::vector<Node> nodes_;              // of the step laid out, chunk after chunk
  std::vector<std::size_t> first_node_;  // of each chunk, and the end
  std::int64_t tokens_per_chunk_ = 1;
  std::vector<std::pair<std::int64_t, std::int64_t>> moves_;
  std::array<std::int64_t, kMaxNodes> tried_{}, taken_{};
  std::int64_t num_near_ties_ = 0;
};

}  // namespace seer::engine
