// SPDX-License-Identifier: Apache-2.0
// The automaton against brute force: random interleaved growth, then every substring, anchor and follower.
#include "drafting/automaton.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "testing/check.h"

using namespace seer::drafting;

namespace {

using Text = std::vector<Token>;

std::uint32_t occurrences(const std::vector<Text>& texts, const Token* pattern, std::size_t size) {
  std::uint32_t found = 0;
  for (const Text& text : texts) {
    for (std::size_t at = 0; at + size <= text.size(); ++at) {
      if (std::equal(pattern, pattern + size, text.begin() + static_cast<std::ptrdiff_t>(at))) ++found;
    }
  }
  return found;
}

std::map<Token, std::uint32_t> followers(const std::vector<Text>& texts, const Text& pattern) {
  std::map<Token, std::uint32_t> found;
  for (const Text& text : texts) {
    for (std::size_t at = 0; at + pattern.size() < text.size(); ++at) {
      if (std::equal(pattern.begin(), pattern.end(), text.begin() + static_cast<std::ptrdiff_t>(at))) {
        ++found[text[at + pattern.size()]];
      }
    }
  }
  return found;
}

State walk(const SuffixAutomaton& automaton, const Token* pattern, std::size_t size) {
  State state = kRoot;
  for (std::size_t i = 0; i < size && state != kNone; ++i) state = automaton.step(state, pattern[i]);
  return state;
}

void check_everything(const SuffixAutomaton& automaton, const std::vector<Sequence>& sequences,
                      const std::vector<Text>& texts) {
  CHECK(automaton.check_integrity().empty());
  for (std::size_t s = 0; s < texts.size(); ++s) {
    const Text& text = texts[s];
    for (std::size_t from = 0; from < text.size(); ++from) {
      for (std::size_t size = 1; size <= 8 && from + size <= text.size(); ++size) {
        const State state = walk(automaton, &text[from], size);
        CHECK(state != kNone);
        CHECK(automaton.count(state) == occurrences(texts, &text[from], size));
      }
    }
    // The anchor: the tail's link is the longest suffix that occurs twice.
    const std::uint32_t anchor = automaton.length(automaton.link(sequences[s].tail));
    for (std::size_t size = text.size(); size > 0; --size) {
      if (occurrences(texts, &text[text.size() - size], size) > 1) {
        CHECK(anchor == size);
        break;
      }
      CHECK(anchor < size);
    }
    Text copy(text.size() - 1);
    automaton.copy_tokens(sequences[s], 0, sequences[s].length, copy.data());
    CHECK(std::equal(copy.begin(), copy.end(), text.begin() + 1));
  }
}

void random_group(std::mt19937& rng, int alphabet, int members, int steps) {
  SuffixAutomaton automaton;
  std::vector<Sequence> sequences;
  std::vector<Text> texts(static_cast<std::size_t>(members), Text{kBegin});
  for (int m = 0; m < members; ++m) sequences.push_back(automaton.begin(nullptr, 0));
  for (int i = 0; i < steps; ++i) {
    const std::size_t m = rng() % static_cast<unsigned>(members);
    // Half of the time repeat the tokens of another member: siblings are alike.
    const Text& other = texts[rng() % static_cast<unsigned>(members)];
    const bool repeat = rng() % 2 == 0 && other.size() > texts[m].size();
    const Token token = repeat ? other[texts[m].size()] : static_cast<Token>(rng() % static_cast<unsigned>(alphabet));
    automaton.append(sequences[m], token, nullptr);
    texts[m].push_back(token);
  }
  check_everything(automaton, sequences, texts);
}

void wide_states_keep_their_top(std::mt19937& rng) {
  SuffixAutomaton automaton;
  Sequence sequence = automaton.begin(nullptr, 0);
  Text text{kBegin};
  for (int i = 0; i < 4000; ++i) {
    // Token 0 is followed by 1..300, the small ones far more often.
    const unsigned r = rng() % 300;
    const Token token = i % 2 == 0 ? 0 : static_cast<Token>(1 + r * r / 300);
    automaton.append(sequence, token, nullptr);
    text.push_back(token);
  }
  CHECK(automaton.check_integrity().empty());
  const std::map<Token, std::uint32_t> truth = followers({text}, {0});
  CHECK(truth.size() > 100);
  std::vector<std::uint32_t> largest;
  for (const auto& entry : truth) largest.push_back(entry.second);
  std::sort(largest.rbegin(), largest.rend());
  SuffixAutomaton::Followers found;
  const Token zero = 0;
  automaton.followers(walk(automaton, &zero, 1), &found);
  CHECK(found.wide && found.size == EdgeStore::kTop);
  CHECK(found.degree == truth.size());
  std::vector<std::uint32_t> listed;
  for (int i = 0; i < found.size; ++i) {
    const std::uint32_t count = static_cast<std::uint32_t>(found.count[i]);
    CHECK(truth.at(found.edges[i].token) == count);
    listed.push_back(count);
  }
  std::sort(listed.rbegin(), listed.rend());
  CHECK(std::equal(listed.begin(), listed.end(), largest.begin()));
}

void loops_stay_cheap() {
  for (const int period : {1, 3, 500}) {
    SuffixAutomaton automaton;
    Sequence sequence = automaton.begin(nullptr, 0);
    for (int i = 0; i < 20000; ++i) automaton.append(sequence, i % period, nullptr);
    // What the loop repeats is known to the end; memory stays linear.
    CHECK(automaton.length(automaton.link(sequence.tail)) == 20000u - static_cast<unsigned>(period));
    CHECK(automaton.bytes() < 20000 * 64);
  }
}

void a_lead_is_context_but_not_response() {
  SuffixAutomaton automaton;
  const Token lead[] = {8, 9};
  Sequence first = automaton.begin(lead, 2), second = automaton.begin(lead, 2);
  automaton.append(first, 1, nullptr);
  automaton.append(first, 2, nullptr);
  CHECK(first.length == 2 && second.length == 0);
  Token copy[2];
  automaton.copy_tokens(first, 0, 2, copy);
  CHECK(copy[0] == 1 && copy[1] == 2);
  SuffixAutomaton::Followers found;
  automaton.followers(automaton.link(second.tail), &found);
  CHECK(found.size == 1 && found.total == 1);
  CHECK(found.edges[0].token == 1);
}

void long_responses_cross_blocks() {
  SuffixAutomaton automaton;
  std::vector<Sequence> sequences{automaton.begin(nullptr, 0), automaton.begin(nullptr, 0)};
  for (int i = 0; i < 1000; ++i) {
    automaton.append(sequences[0], i, nullptr);
    automaton.append(sequences[1], i + (i > 500), nullptr);
  }
  for (std::uint32_t from = 0; from < 1000; ++from) {
    Token token;
    automaton.copy_tokens(sequences[1], from, 1, &token);
    CHECK(token == static_cast<Token>(from) + (from > 500));
  }
}

}  // namespace

int main() {
  std::mt19937 rng(7);
  for (int round = 0; round < 60; ++round) {
    random_group(rng, 2 + round % 4, 1 + round % 5, 40 + round);
    random_group(rng, 30, 4, 150);
  }
  wide_states_keep_their_top(rng);
  loops_stay_cheap();
  a_lead_is_context_but_not_response();
  long_responses_cross_blocks();
  return seer::testing::passed("automaton");
}
