// SPDX-License-Identifier: Apache-2.0
#include "draft_burst.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace seer::engine {
namespace {

enum Field { kToken, kPosition, kSlot, kVisible, kNodes, kSeqSlot };

std::int32_t token_of(const float* sampled) {
  std::int32_t token;
  std::memcpy(&token, sampled, sizeof token);
  return token;
}

}  // namespace

void DraftBurst::add(BurstChunk chunk) { chunks_.push_back(std::move(chunk)); }

std::int64_t DraftBurst::num_live() const {
  return std::count_if(chunks_.begin(), chunks_.end(), [](const BurstChunk& chunk) { return chunk.live(); });
}

void DraftBurst::limit(const std::int32_t* most, std::int32_t* out) {
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    BurstChunk& chunk = chunks_[i];
    chunk.limit = chunk.live() ? static_cast<std::int32_t>(std::min<std::int64_t>(most[i], chunk.remaining - 1)) : 0;
    out[i] = chunk.limit;
  }
}

bool DraftBurst::lay_out(const TreeTable& trees, const BlockTables& tables, std::int64_t num_chunks,
                         std::int64_t tokens_per_chunk, std::int32_t* rows, std::int64_t max_moves,
                         std::int32_t* moves) {
  if (static_cast<std::int64_t>(moves_.size()) > max_moves) return false;
  std::fill(moves, moves + 2 * max_moves, -1);
  for (std::size_t i = 0; i < moves_.size(); ++i) {
    moves[i] = static_cast<std::int32_t>(moves_[i].first);
    moves[max_moves + i] = static_cast<std::int32_t>(moves_[i].second);
  }
  moves_.clear();

  const std::int64_t num_batched_tokens = num_chunks * tokens_per_chunk;
  const auto field = [&](Field which) { return rows + which * num_batched_tokens; };
  std::fill(rows, rows + 6 * num_batched_tokens, 0);
  std::fill(field(kSlot), field(kSlot) + num_batched_tokens, geometry_.spare_slot);
  std::fill(field(kVisible), field(kVisible) + num_batched_tokens, 1);
  std::fill(field(kSeqSlot), field(kSeqSlot) + num_batched_tokens, geometry_.spare_seq_slot);

  tokens_per_chunk_ = tokens_per_chunk;
  nodes_.clear();
  first_node_.assign(1, 0);
  std::int64_t scratch = geometry_.first_scratch_slot, at = 0;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const BurstChunk& chunk = chunks_[i];
    if (chunk.live()) {
      field(kToken)[at] = chunk.token;
      field(kPosition)[at] = static_cast<std::int32_t>(chunk.root);
      field(kSlot)[at] = static_cast<std::int32_t>(slot(chunk, tables, chunk.root));
      std::fill_n(field(kVisible) + at, tokens_per_chunk, static_cast<std::int32_t>(chunk.root + 1));
      std::fill_n(field(kSeqSlot) + at, tokens_per_chunk, chunk.seq_slot);
      const std::size_t first = nodes_.size();
      std::int32_t tip = -1;
      for (std::int32_t node = 0; node < trees.counts[i]; ++node) {
        const std::int32_t parent = trees.parents[i * trees.width + node];
        Node made{trees.tokens[i * trees.width + node],
                  parent,
                  static_cast<std::int32_t>(scratch++),
                  1,
                  1u << node,
                  parent == tip};
        if (parent >= 0) {
          made.depth = nodes_[first + parent].depth + 1;
          made.seen |= nodes_[first + parent].seen;
        }
        if (made.on_first_path) {
          tip = node;
          made.slot = static_cast<std::int32_t>(slot(chunk, tables, chunk.root + made.depth));
        }
        const std::int64_t row = at + 1 + node;
        field(kToken)[row] = made.token;
        field(kPosition)[row] = static_cast<std::int32_t>(chunk.root + made.depth);
        field(kSlot)[row] = made.slot;
        field(kNodes)[row] = static_cast<std::int32_t>(made.seen);
        nodes_.push_back(made);
      }
      at += tokens_per_chunk;
    }
    first_node_.push_back(nodes_.size());
  }
  return true;
}

void DraftBurst::settle(const float* sampled, const BlockTables& tables, float near_tie, std::int32_t* tokens,
                        std::int64_t* offsets) {
  offsets[0] = 0;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    BurstChunk& chunk = chunks_[i];
    offsets[i + 1] = offsets[i];
    if (!chunk.live()) continue;
    const std::size_t num_before = chunk.tokens.size();
    const std::size_t first = first_node_[i], end = first_node_[i + 1];
    // Children come after their parent and siblings differ, so the way down is found in one pass.
    std::int32_t token = token_of(sampled), at = -1;
    std::int64_t row = 0;
    const auto take = [&] {
      const float* from = sampled + 4 * row;
      chunk.tokens.push_back(token);
      chunk.logprobs.push_back(from[1]);
      chunk.raw_logprobs.push_back(from[2]);
      num_near_ties_ += from[3] < near_tie;
    };
    take();
    for (std::size_t node = first; node < end; ++node) {
      const Node& child = nodes_[node];
      if (child.parent != at || child.token != token) continue;
      if (chunk.stops_at(token) || static_cast<std::int64_t>(chunk.tokens.size() - num_before) >= chunk.remaining)
        break;
      const std::int64_t own = slot(chunk, tables, chunk.root + child.depth);
      if (child.slot != own) moves_.emplace_back(child.slot, own);
      at = static_cast<std::int32_t>(node - first);
      row = 1 + at;
      if (at < kMaxNodes) taken_[at] += 1;
      token = token_of(sampled + 4 * row);
      take();
    }
    const std::int64_t emitted = static_cast<std::int64_t>(chunk.tokens.size() - num_before);
    for (std::int32_t node = 0; node < std::min<std::int32_t>(chunk.limit, kMaxNodes); ++node) tried_[node] += 1;
    chunk.drafted += static_cast<std::int64_t>(end - first);
    chunk.accepted += emitted - 1;
    chunk.root += emitted;
    chunk.remaining -= emitted;
    chunk.token = token;
    chunk.stopped = chunk.stops_at(token);
    std::copy(chunk.tokens.begin() + num_before, chunk.tokens.end(), tokens + offsets[i]);
    offsets[i + 1] += emitted;
    sampled += 4 * tokens_per_chunk_;
  }
}

std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> DraftBurst::take_moves() {
  std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> taken;
  for (const auto& [source, target] : moves_) {
    taken.first.push_back(source);
    taken.second.push_back(target);
  }
  moves_.clear();
  return taken;
}

}  // namespace seer::engine
