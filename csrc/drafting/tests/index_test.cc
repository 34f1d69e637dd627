// SPDX-License-Identifier: Apache-2.0
// The index as its users meet it: idempotent appends, limits, calibration, and many threads at once.
#include <atomic>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "drafting/draft_index.h"
#include "testing/check.h"

using namespace seer::drafting;

namespace {

constexpr std::uint64_t kPlenty = std::uint64_t{1} << 30;

std::vector<Token> range(Token from, Token to) {
  std::vector<Token> tokens(static_cast<std::size_t>(to - from));
  std::iota(tokens.begin(), tokens.end(), from);
  return tokens;
}

void appends_are_idempotent() {
  DraftIndex index(kPlenty);
  const std::vector<Token> text = range(0, 300);
  CHECK(index.append(1, 1, 0, text.data(), 200) == 200);
  CHECK(index.append(1, 1, 0, text.data(), 200) == 200);
  CHECK(index.append(1, 1, 250, text.data() + 250, 50) == 200);
  CHECK(index.append(1, 1, 150, text.data() + 150, 150) == 300);
  CHECK(index.append(1, 1, 10, text.data(), 5) == DraftIndex::kConflict);
  CHECK(index.tokens(1, 1, 0) == text);
  CHECK(index.check_integrity(1).empty());
}

// One draft; the number of its nodes.
int speculate(DraftIndex& index, GroupId group, RequestId request, int budget, const DraftOptions& options,
              const DraftRow& out) {
  Drafter drafter(index.hits(), index.calibration());
  DraftIndex::DraftItem item{group, request, budget, out, 0};
  index.speculate(drafter, &item, 1, options, true);
  return item.size;
}

void a_batch_survives_the_loss_of_its_group() {
  DraftIndex index(kPlenty);
  DraftIndex::Cursor cursor;
  const std::vector<Token> text = range(0, 10);
  CHECK(index.append(cursor, 1, 1, 0, text.data(), 5) == 5);
  CHECK(index.drop(1));
  // What comes next has a gap before it; what starts anew is held by the group in the table, not by the dropped one.
  CHECK(index.append(cursor, 1, 1, 5, text.data() + 5, 5) == 0);
  CHECK(index.append(cursor, 1, 2, 0, text.data(), 10) == 10);
  CHECK(index.length(1, 2) == 10);
  CHECK(index.length(1, 1) == 0);
  CHECK(index.append(cursor, 2, 1, 0, text.data(), 3) == 3);
  CHECK(index.append(cursor, 1, 3, 0, text.data(), 3) == 3);
  Token tokens[2];
  std::int32_t parents[2];
  float confidence[2];
  CHECK(speculate(index, 1, 3, 2, DraftOptions(), {tokens, parents, confidence}) == 2);
  CHECK(tokens[0] == 3 && tokens[1] == 4);
  CHECK(speculate(index, 9, 3, 2, DraftOptions(), {tokens, parents, confidence}) == 0);
}

void memory_is_limited_and_returned() {
  const std::uint64_t limit = 2 << 20;
  DraftIndex index(limit);
  std::mt19937 rng(1);
  for (GroupId group = 0; group < 40; ++group) {
    std::vector<Token> tokens(8000);
    for (Token& token : tokens) token = static_cast<Token>(rng() % 1000);
    CHECK(index.append(group, 0, 0, tokens.data(), tokens.size()) == 8000);
    CHECK(index.stats().bytes <= limit);
  }
  CHECK(index.stats().evicted_groups > 0);
  CHECK(index.length(39, 0) == 8000);
  CHECK(index.length(0, 0) == 0);
  for (GroupId group = 0; group < 40; ++group) index.drop(group);
  CHECK(index.stats().bytes == 0);

  // A single group too large for the limit goes too, and the caller learns that nothing is held.
  std::vector<Token> huge(200000);
  for (Token& token : huge) token = static_cast<Token>(rng() % 50000);
  CHECK(index.append(7, 0, 0, huge.data(), huge.size()) == 0);
  CHECK(index.stats().bytes == 0);
}

void calibration_learns_what_is_accepted() {
  Calibration calibration;
  CHECK(std::abs(calibration.map().correct(0.5f) - 0.5f) < 0.02f);
  std::mt19937 rng(2);
  std::uniform_real_distribution<float> uniform(0, 1);
  for (int i = 0; i < 60000; ++i) {
    const float raw = uniform(rng);
    calibration.observe(raw, uniform(rng) < raw * raw);  // optimistic by construction
  }
  float last = -1;
  for (float raw = 0.01f; raw < 1; raw += 0.01f) {
    const float corrected = calibration.map().correct(raw);
    CHECK(corrected > last);
    CHECK(std::abs(corrected - raw * raw) < 0.05f);
    CHECK(std::abs(calibration.map().invert(corrected) - raw) < 0.01f);
    last = corrected;
  }
}

void calibration_pools_what_is_not_monotone() {
  Calibration calibration;
  for (int i = 0; i < 20000; ++i) {
    calibration.observe(0.45f, i % 10 < 6);
    calibration.observe(0.55f, i % 10 < 2);
  }
  // Nodes at 0.45 were accepted more often than those at 0.55: the best monotone answer is the mean for both.
  CHECK(std::abs(calibration.map().correct(0.45f) - 0.4f) < 0.02f);
  CHECK(std::abs(calibration.map().correct(0.55f) - 0.4f) < 0.02f);
}

void drafts_are_scored_when_the_response_grows() {
  // A sibling that is always wrong from the second token on: confidence in second tokens must fall.
  DraftIndex index(kPlenty);
  Token tokens[4];
  std::int32_t parents[4];
  float before[4] = {}, after[4] = {};
  for (int round = 0; round < 3000; ++round) {
    const GroupId group = static_cast<GroupId>(round);
    const Token sibling[] = {1, 2, 3, 4};
    const Token own[] = {1, 5, 6, 7};
    index.append(group, 0, 0, sibling, 4);
    index.append(group, 1, 0, own, 0);
    float* confidence = round == 0 ? before : after;
    CHECK(speculate(index, group, 1, 4, DraftOptions(), {tokens, parents, confidence}) == 4);
    index.append(group, 1, 0, own, 4);
    index.drop(group);
  }
  CHECK(after[1] < before[1] || after[1] < 0.05f);
  CHECK(after[0] > 0.7f);
  CHECK(after[1] < 0.1f);
}

// Appends, drafts, drops and looks from many threads at the same few groups, for the thread sanitizer.
void threads_share_groups() {
  DraftIndex index(4 << 20);
  std::atomic<std::uint64_t> drafted{0};
  const auto work = [&](unsigned seed) {
    std::mt19937 rng(seed);
    Drafter drafter(index.hits(), index.calibration());
    constexpr int kBatch = 20, kBudget = 16;  // more than are drafted together
    Token tokens[kBatch * kBudget];
    std::int32_t parents[kBatch * kBudget];
    float confidence[kBatch * kBudget];
    for (int i = 0; i < 1500; ++i) {
      const GroupId group = rng() % 6;
      const RequestId request = rng() % 4;
      DraftOptions options;
      options.paths = 1 + static_cast<std::int32_t>(rng() % 3);
      switch (rng() % 8) {
        case 0:
          if (rng() % 50 == 0) index.drop(group);
          index.stats();
          break;
        case 1: {
          const Token context[] = {1, 2, 3};
          index.speculate_context(drafter, group, context, 3, kBudget, options, {tokens, parents, confidence});
          index.feedback(0.5f, rng() % 2 == 0);
          break;
        }
        case 2:
        case 3: {
          std::vector<Token> more(1 + rng() % 200);
          for (Token& token : more) token = static_cast<Token>(rng() % 9);
          // Two writers of one response may race; the loser sees a gap or a conflict, never damage.
          index.append(group, request, index.length(group, request), more.data(), more.size());
          break;
        }
        default: {
          // Groups in any order, some twice: batches that hold several locks must not wait for each other.
          DraftIndex::DraftItem items[kBatch];
          for (int k = 0; k < kBatch; ++k) {
            const int at = k * kBudget;
            items[k] = {rng() % 7, rng() % 5, kBudget, {tokens + at, parents + at, confidence + at}, 0};
          }
          index.speculate(drafter, items, kBatch, options, true);
          for (const DraftIndex::DraftItem& item : items) drafted += static_cast<std::uint64_t>(item.size);
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  CHECK(drafted > 0);
  for (GroupId group = 0; group < 6; ++group) {
    const std::string broken = index.check_integrity(group);
    CHECK(broken.empty() || broken == "no such group");
  }
}

}  // namespace

int main() {
  appends_are_idempotent();
  a_batch_survives_the_loss_of_its_group();
  memory_is_limited_and_returned();
  calibration_learns_what_is_accepted();
  calibration_pools_what_is_not_monotone();
  drafts_are_scored_when_the_response_grows();
  threads_share_groups();
  return seer::testing::passed("index");
}
