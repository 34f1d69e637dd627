// SPDX-License-Identifier: Apache-2.0
// Verification steps against a slow twin that looks every node's path up from the root, and walks a tree by search.
#include "engine/draft_burst.h"

#include <cstring>
#include <random>
#include <set>

#include "testing/check.h"

using namespace seer::engine;

namespace {

constexpr std::int64_t kBlockSize = 4, kFirstScratch = 1000, kNumBlocks = 16;
constexpr std::int32_t kSpareSeqSlot = 99, kSpareSlot = 777, kVocab = 3, kMostNodes = 6;
constexpr float kNearTie = 0.25f;

struct Tree {
  std::vector<std::int32_t> tokens, parents;

  std::vector<int> path(int node) const {  // from the root's child down to the node
    std::vector<int> nodes;
    for (; node >= 0; node = parents[static_cast<std::size_t>(node)]) nodes.insert(nodes.begin(), node);
    return nodes;
  }
  // The first child of the root, its first child, and so on.
  std::vector<int> first_path() const {
    std::vector<int> nodes;
    for (int at = -1, child = 0; child >= 0;) {
      child = -1;
      for (int node = static_cast<int>(tokens.size()) - 1; node >= 0; --node)
        if (parents[static_cast<std::size_t>(node)] == at) child = node;
      if (child >= 0) nodes.push_back(child), at = child;
    }
    return nodes;
  }
  int child(int at, std::int32_t token) const {
    for (std::size_t node = 0; node < tokens.size(); ++node)
      if (parents[node] == at && tokens[node] == token) return static_cast<int>(node);
    return -1;
  }
};

Tree random_tree(std::mt19937& rng, std::int32_t most) {
  Tree tree;
  for (std::uint32_t i = rng() % static_cast<std::uint32_t>(most + 1); i > 0; --i) {
    const auto parent = static_cast<std::int32_t>(rng() % (tree.tokens.size() + 1)) - 1;
    const auto token = static_cast<std::int32_t>(rng() % kVocab);
    if (tree.child(parent, token) >= 0) continue;  // siblings differ
    tree.tokens.push_back(token);
    tree.parents.push_back(parent);
  }
  return tree;
}

struct Chunk {
  std::int32_t seq_slot;
  std::vector<std::int32_t> blocks;
  std::int64_t num_known;  // tokens; the KV of the last is not yet computed
  std::int32_t last;
  std::int64_t remaining;
  std::set<std::int32_t> stops;
  bool stopped = false;
  std::int64_t num_drafted = 0, num_accepted = 0;
  std::vector<std::int32_t> tokens;
  std::vector<float> logprobs, raw_logprobs;

  bool live() const { return !stopped && remaining > 0; }
  std::int64_t slot(std::int64_t position) const {
    return blocks[static_cast<std::size_t>(position / kBlockSize)] * kBlockSize + position % kBlockSize;
  }
  std::vector<std::int64_t> node_slots(const Tree& tree, std::int64_t scratch) const {
    std::vector<std::int64_t> slots;
    for (std::size_t node = 0; node < tree.tokens.size(); ++node) slots.push_back(scratch++);
    std::int64_t position = num_known;
    for (const int node : tree.first_path()) slots[static_cast<std::size_t>(node)] = slot(position++);
    return slots;
  }
};

struct Sampled {
  std::int32_t token;
  float logprob, raw_logprob, lead;
};

using Moves = std::vector<std::pair<std::int64_t, std::int64_t>>;

void steps_are_those_of_the_twin(std::mt19937& rng) {
  std::vector<Chunk> chunks(1 + rng() % 4);
  std::vector<std::int32_t> tables(chunks.size() * 2 * kNumBlocks, -1);
  DraftBurst burst({kBlockSize, kFirstScratch, kSpareSeqSlot, kSpareSlot});
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Chunk& chunk = chunks[i];
    chunk.seq_slot = static_cast<std::int32_t>(2 * i + rng() % 2);
    for (std::int32_t block = 0; block < kNumBlocks; ++block)
      chunk.blocks.push_back(static_cast<std::int32_t>(i) * kNumBlocks + block);
    std::shuffle(chunk.blocks.begin(), chunk.blocks.end(), rng);
    std::copy(chunk.blocks.begin(), chunk.blocks.end(), tables.begin() + chunk.seq_slot * kNumBlocks);
    chunk.num_known = 1 + rng() % 20, chunk.remaining = 1 + rng() % 20;
    chunk.last = static_cast<std::int32_t>(rng() % kVocab);
    if (rng() % 2) chunk.stops.insert(static_cast<std::int32_t>(rng() % (2 * kVocab)));
    BurstChunk added{};
    added.seq_slot = chunk.seq_slot, added.root = chunk.num_known - 1, added.token = chunk.last;
    added.remaining = chunk.remaining, added.stop_ids = {chunk.stops.begin(), chunk.stops.end()};
    burst.add(added);
  }

  Moves due;
  std::int64_t num_near_ties = 0;
  std::vector<std::int64_t> tried(kMaxNodes), taken(kMaxNodes);
  for (int step = 0; step < 6; ++step) {
    const auto num_live = std::count_if(chunks.begin(), chunks.end(), [](const Chunk& chunk) { return chunk.live(); });
    CHECK(burst.num_live() == num_live);
    std::vector<std::int32_t> limits(chunks.size()), counts, tree_tokens, tree_parents;
    std::vector<std::int32_t> mosts(chunks.size());
    for (std::int32_t& one : mosts) one = static_cast<std::int32_t>(rng() % (kMostNodes + 1));
    burst.limit(mosts.data(), limits.data());
    std::vector<Tree> trees;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const std::int64_t most = chunks[i].live() ? std::min<std::int64_t>(mosts[i], chunks[i].remaining - 1) : 0;
      CHECK(limits[i] == most);
      trees.push_back(random_tree(rng, limits[i]));
      counts.push_back(static_cast<std::int32_t>(trees[i].tokens.size()));
      for (const auto& [from, to] : {std::pair{&trees[i].tokens, &tree_tokens}, {&trees[i].parents, &tree_parents}}) {
        to->insert(to->end(), from->begin(), from->end());
        to->resize((i + 1) * kMostNodes, -7);
      }
    }

    // What the rows must be, field by field.
    const std::int64_t per_chunk = 1 + kMostNodes,
                       num_rows = (num_live + static_cast<std::int64_t>(rng() % 3)) * per_chunk;
    std::vector<std::vector<std::int32_t>> expected;  // token, position, slot, visible, nodes, seq_slot
    std::vector<std::vector<std::int64_t>> node_slots;
    std::int64_t scratch = kFirstScratch;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const Chunk& chunk = chunks[i];
      node_slots.push_back(chunk.node_slots(trees[i], scratch));
      scratch += counts[i];
      if (!chunk.live()) continue;
      const auto known = static_cast<std::int32_t>(chunk.num_known);
      expected.push_back(
          {chunk.last, known - 1, static_cast<std::int32_t>(chunk.slot(known - 1)), known, 0, chunk.seq_slot});
      for (std::size_t node = 0; node < kMostNodes; ++node) {
        expected.push_back({0, 0, kSpareSlot, known, 0, chunk.seq_slot});
        if (node >= trees[i].tokens.size()) continue;
        const std::vector<int> path = trees[i].path(static_cast<int>(node));
        std::int32_t seen = 0;
        for (const int above : path) seen |= 1 << above;
        expected.back() = {trees[i].tokens[node],
                           known - 1 + static_cast<std::int32_t>(path.size()),
                           static_cast<std::int32_t>(node_slots[i][node]),
                           known,
                           seen,
                           chunk.seq_slot};
      }
    }
    expected.resize(static_cast<std::size_t>(num_rows), {0, 0, kSpareSlot, 1, 0, kSpareSeqSlot});

    const TreeTable table{tree_tokens.data(), tree_parents.data(), counts.data(), kMostNodes};
    const BlockTables blocks{tables.data(), kNumBlocks};
    std::vector<std::int32_t> rows(static_cast<std::size_t>(6 * num_rows), -5);
    if (!due.empty()) {
      std::vector<std::int32_t> few(2 * (due.size() - 1));
      CHECK(!burst.lay_out(table, blocks, num_rows / per_chunk, per_chunk, rows.data(),
                           static_cast<std::int64_t>(due.size()) - 1, few.data()));
    }
    const std::size_t max_moves = due.size() + rng() % 3;
    std::vector<std::int32_t> moves(2 * max_moves, -5);
    CHECK(burst.lay_out(table, blocks, num_rows / per_chunk, per_chunk, rows.data(),
                        static_cast<std::int64_t>(max_moves), moves.data()));
    for (std::size_t i = 0; i < max_moves; ++i) {
      CHECK(moves[i] == (i < due.size() ? due[i].first : -1));
      CHECK(moves[max_moves + i] == (i < due.size() ? due[i].second : -1));
    }
    for (std::size_t row = 0; row < expected.size(); ++row)
      for (std::size_t field = 0; field < 6; ++field)
        CHECK(rows[field * expected.size() + row] == expected[row][field]);
    CHECK(burst.num_laid_out() == num_live * per_chunk);

    // Any tokens, some of them those of the trees.
    std::vector<Sampled> sampled(static_cast<std::size_t>(num_rows));
    std::uniform_real_distribution<float> uniform(0, 1);
    for (Sampled& one : sampled)
      one = {static_cast<std::int32_t>(rng() % kVocab), uniform(rng), uniform(rng), uniform(rng)};
    std::vector<float> numbers(4 * sampled.size());
    static_assert(sizeof(Sampled) == 4 * sizeof(float));
    if (!sampled.empty()) std::memcpy(numbers.data(), sampled.data(), numbers.size() * sizeof(float));
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(burst.most_tokens()));
    std::vector<std::int64_t> offsets(chunks.size() + 1);
    burst.settle(numbers.data(), blocks, kNearTie, tokens.data(), offsets.data());

    due.clear();
    std::size_t first_row = 0;
    CHECK(offsets[0] == 0);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      Chunk& chunk = chunks[i];
      std::vector<std::int32_t> emitted;
      if (chunk.live()) {
        for (int at = -1;;) {
          const Sampled& one = sampled[first_row + static_cast<std::size_t>(at + 1)];
          emitted.push_back(one.token);
          chunk.logprobs.push_back(one.logprob), chunk.raw_logprobs.push_back(one.raw_logprob);
          num_near_ties += one.lead < kNearTie;
          const int next = trees[i].child(at, one.token);
          if (next < 0 || chunk.stops.count(one.token)) break;
          const std::int64_t own = chunk.slot(chunk.num_known + static_cast<std::int64_t>(emitted.size()) - 1);
          const std::int64_t now = node_slots[i][static_cast<std::size_t>(next)];
          if (now != own) due.emplace_back(now, own);
          at = next;
          ++taken[static_cast<std::size_t>(at)];
        }
        for (std::int32_t node = 0; node < limits[i]; ++node) ++tried[static_cast<std::size_t>(node)];
        first_row += static_cast<std::size_t>(per_chunk);
        chunk.num_drafted += counts[i];
        chunk.num_accepted += static_cast<std::int64_t>(emitted.size()) - 1;
        chunk.num_known += static_cast<std::int64_t>(emitted.size());
        chunk.remaining -= static_cast<std::int64_t>(emitted.size());
        chunk.last = emitted.back();
        chunk.stopped = chunk.stops.count(emitted.back()) > 0;
        chunk.tokens.insert(chunk.tokens.end(), emitted.begin(), emitted.end());
      }
      CHECK(offsets[i + 1] - offsets[i] == static_cast<std::int64_t>(emitted.size()));
      CHECK(std::equal(emitted.begin(), emitted.end(), tokens.begin() + offsets[i]));
    }
  }

  const auto [sources, targets] = burst.take_moves();
  CHECK(sources.size() == due.size() && targets.size() == due.size());
  for (std::size_t i = 0; i < due.size(); ++i) CHECK(sources[i] == due[i].first && targets[i] == due[i].second);
  CHECK(burst.take_moves().first.empty());
  CHECK(burst.num_near_ties() == num_near_ties);
  CHECK(std::equal(tried.begin(), tried.end(), burst.tried().begin()));
  CHECK(std::equal(taken.begin(), taken.end(), burst.taken().begin()));
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const BurstChunk& chunk = burst.chunk(i);
    CHECK(chunk.tokens == chunks[i].tokens && chunk.stopped == chunks[i].stopped &&
          chunk.remaining == chunks[i].remaining);
    CHECK(chunk.logprobs == chunks[i].logprobs && chunk.raw_logprobs == chunks[i].raw_logprobs);
    CHECK(chunk.drafted == chunks[i].num_drafted && chunk.accepted == chunks[i].num_accepted);
  }
}

}  // namespace

int main() {
  std::mt19937 rng(static_cast<unsigned>(seer::testing::seed()));
  for (int round = 0; round < 400; ++round) steps_are_those_of_the_twin(rng);
  return seer::testing::passed("draft_burst");
}
