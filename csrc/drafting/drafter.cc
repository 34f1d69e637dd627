// SPDX-License-Identifier: Apache-2.0
#include "drafter.h"

#include <algorithm>
#include <cstring>

namespace seer::drafting {

void Drafter::draft(Job* jobs, int count, const DraftOptions& options) {
  set(options);
  for (int i = 0; i < count; ++i) jobs[i].text->prefetch(jobs[i].sequence->tail);
  State longest[kTogether];
  for (int i = 0; i < count; ++i) {
    longest[i] = jobs[i].text->link(jobs[i].sequence->tail);
    jobs[i].text->prefetch(longest[i]);
  }
  for (int i = 0; i < count; ++i) {
    Walk& walk = walks_[i];
    walk.reader = {jobs[i].text, &hits_, options.match_min};
    walk.budget = jobs[i].budget;
    walk.out = jobs[i].out;
    start(walk, longest[i], jobs[i].text->length(longest[i]), 1);
  }
  run(count);
  for (int i = 0; i < count; ++i) jobs[i].size = walks_[i].size;
}

int Drafter::draft_after(const SuffixAutomaton& text, const Token* context, std::size_t size, int budget,
                         const DraftOptions& options, const DraftRow& out) {
  set(options);
  State state;
  std::uint32_t matched;
  text.match(context, size, &state, &matched);
  Walk& walk = walks_[0];
  walk.reader = {&text, &hits_, options.match_min};
  walk.budget = budget;
  walk.out = out;
  start(walk, state, matched, 0);
  run(1);
  return walk.size;
}

void Drafter::set(const DraftOptions& options) {
  options_ = options;
  min_raw_ = options.min_confidence > 0 ? calibration_.invert(options.min_confidence) : 0;
}

// Puts a walk at the longest context to draft from. A state whose every string is longer than match_max is passed over;
// one that straddles it counts as match_max tokens long.
void Drafter::start(Walk& walk, State state, std::uint32_t matched, std::uint32_t own) const {
  const SuffixAutomaton& text = *walk.reader.text;
  if (matched > options_.match_max) {
    while (text.length(text.link(state)) >= options_.match_max) state = text.link(state);
    matched = options_.match_max;
  }
  walk.context = walk.reader.going_on({state, matched, own});
  walk.raw = 1;
  walk.size = 0;
}

void Drafter::run(int count) {
  if (options_.paths <= 1) {
    linear(count);
    return;
  }
  for (int i = 0; i < count; ++i) {
    if (!walks_[i].ended()) tree(walks_[i]);
  }
}

void Drafter::linear(int count) {
  Walk* going[kTogether];
  Walk* unsure[kTogether];
  for (int i = 0; i < count; ++i) going[i] = &walks_[i];
  while (true) {
    Walk** const end = std::remove_if(going, going + count, [](const Walk* walk) { return walk->ended(); });
    count = static_cast<int>(end - going);
    if (count == 0) return;
    int uncertain = 0;
    for (int i = 0; i < count; ++i) {
      if (!advance(*going[i])) unsure[uncertain++] = going[i];
    }
    for (int i = 0; i < uncertain; ++i) estimates_[i].find_contexts(unsure[i]->reader, unsure[i]->context);
    for (int i = 0; i < uncertain; ++i) estimates_[i].read_followers(unsure[i]->reader);
    for (int i = 0; i < uncertain; ++i) choose(*unsure[i], estimates_[i]);
  }
}

// Drafts the next token where that takes no comparison, and all that follow it in the same response. False if it does
// take one.
bool Drafter::advance(Walk& walk) const {
  const SuffixAutomaton& text = *walk.reader.text;
  const Context context = walk.reader.going_on(walk.context);
  walk.context = context;
  if (!context.exists()) return true;
  if (!text.is_branch(context.state)) return follow_response(walk);
  const SuffixAutomaton::Successor only = text.only_successor(context.state);
  if (only.state == kNone) return false;
  const float known = walk.reader.hit(context, 1);
  if (known < kCertain) return false;
  if (!extend(walk, known, only.token)) return true;
  walk.context = {only.state, context.length + 1, 0};
  text.prefetch(only.state);
  return true;
}

// Along the one response that has come this far, which is what most drafts do. On a copy, which stays in registers:
// writing the walk and reading it back takes as long as the rest of a token.
bool Drafter::follow_response(Walk& original) const {
  Walk walk = original;
  const SuffixAutomaton& text = *walk.reader.text;
  bool certain = true;
  for (; walk.size < walk.budget; ++walk.context.length) {
    const State after = text.next(walk.context.state);
    if (after == kNone) break;
    const float known = hits_.probability(walk.context.length, 1, 1);
    certain = known >= kCertain;
    if (!certain || !extend(walk, known, text.token(after))) break;
    walk.context.state = after;
  }
  original = walk;
  return certain;
}

// Adds a node to a linear draft, or ends it if that is too unlikely.
inline bool Drafter::extend(Walk& walk, float probability, Token token) const {
  walk.raw *= probability;
  if (walk.raw < min_raw_) {
    walk.end();
    return false;
  }
  walk.take(token, walk.size - 1, walk.raw);
  return true;
}

void Drafter::choose(Walk& walk, Estimate& estimate) const {
  const SuffixAutomaton& text = *walk.reader.text;
  estimate.weigh();
  const Estimate::Best best = estimate.best();
  if (!extend(walk, best.probability, best.token)) return;
  const State next = best.leads_to != kNone ? best.leads_to : text.step(best.known_by->state, best.token);
  walk.context = {next, best.known_by->length + 1, 0};
  text.prefetch(next);
}

void Drafter::tree(Walk& walk) {
  pending_.clear();
  heap_.clear();
  expand(walk, walk.context, 1, -1);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    const Pending best = pending_[~static_cast<std::uint32_t>(heap_.back())];
    heap_.pop_back();
    if (best.token == kNoToken) {
      expand_rest(walk, best);
      continue;
    }
    walk.take(best.token, best.parent, best.raw);
    if (walk.size == walk.budget) return;
    const State state = walk.reader.text->step(best.from.state, best.token);
    const Context next = walk.reader.going_on({state, best.from.length + 1, 0});
    if (next.exists()) expand(walk, next, best.raw, walk.size - 1);
  }
}

void Drafter::expand(const Walk& walk, const Context& context, float raw, std::int32_t parent) {
  const SuffixAutomaton::Successor only = walk.reader.text->only_successor(context.state);
  if (only.state != kNone) {
    const float known = walk.reader.hit(context, 1);
    push(raw * known, only.token, parent, context);
    push(raw * (1 - known), kNoToken, parent, context);
    return;
  }
  estimates_[0].make(walk.reader, context);
  Candidates candidates;
  estimates_[0].list(&candidates);
  push_best(walk, candidates, options_.paths, raw, parent);
}

void Drafter::expand_rest(const Walk& walk, Pending rest) {
  estimates_[0].make(walk.reader, rest.from);
  Candidates candidates;
  estimates_[0].list(&candidates);
  const Token only = walk.reader.text->only_successor(rest.from.state).token;
  candidates.remove(
      static_cast<int>(std::find(candidates.token, candidates.token + candidates.size, only) - candidates.token));
  push_best(walk, candidates, options_.paths - 1, rest.raw / (1 - walk.reader.hit(rest.from, 1)), rest.parent);
}

// Puts the likeliest `most` of the latest estimate's candidates under a node of confidence `raw`.
void Drafter::push_best(const Walk& walk, Candidates& candidates, int most, float raw, std::int32_t parent) {
  most = std::min(most, walk.budget - walk.size);
  for (; most > 0 && candidates.size > 0; --most) {
    const int best = candidates.most_likely();
    push(raw * candidates.probability[best], candidates.token[best], parent,
         estimates_[0].context(candidates.known_by[best]));
    candidates.remove(best);
  }
}

void Drafter::push(float raw, Token token, std::int32_t parent, const Context& from) {
  if (raw < min_raw_) return;
  std::uint32_t bits;
  std::memcpy(&bits, &raw, sizeof bits);
  heap_.push_back(Rank{bits} << 32 | ~static_cast<std::uint32_t>(pending_.size()));
  std::push_heap(heap_.begin(), heap_.end());
  Pending& pending = pending_.emplace_back();
  pending.token = token;
  pending.parent = parent;
  pending.raw = raw;
  pending.from = from;
}

}  // namespace seer::drafting
