#include "drafter.h"

#include <algorithm>
#include <cstring>

namespace seer::drafting {

const std::vector<DraftNode>& Drafter::draft(const SuffixAutomaton& text, const Sequence& sequence, int budget,
                                             const DraftOptions& options) {
  text_ = &text;
  options_ = options;
  const State longest = text.link(sequence.tail);
  return run(first(longest, text.length(longest), 1), budget);
}

const std::vector<DraftNode>& Drafter::draft_after(const SuffixAutomaton& text, const Token* context,
                                                   std::size_t size, int budget, const DraftOptions& options) {
  text_ = &text;
  options_ = options;
  State state;
  std::uint32_t matched;
  text.match(context, size, &state, &matched);
  return run(first(state, matched, 0), budget);
}

// The longest context to draft from. A state whose every string is longer than match_max is passed over; one that
// straddles it counts as match_max tokens long.
Drafter::Context Drafter::first(State state, std::uint32_t matched, std::uint32_t own) const {
  if (matched > options_.match_max) {
    while (text_->length(text_->link(state)) >= options_.match_max) state = text_->link(state);
    matched = options_.match_max;
  }
  return going_on({state, matched, own});
}

const std::vector<DraftNode>& Drafter::run(const Context& start, int budget) {
  nodes_.clear();
  budget_ = budget;
  if (!start.exists() || budget <= 0) return nodes_;
  min_raw_ = options_.min_confidence > 0 ? calibration_.invert(options_.min_confidence) : 0;
  if (options_.paths <= 1) {
    linear(start);
  } else {
    tree(start);
  }
  return nodes_;
}

void Drafter::linear(Context context) {
  Candidates candidates;
  float raw = 1;
  for (int i = 0; i < budget_ && context.exists(); ++i) {
    const SuffixAutomaton::Successor only = text_->only_successor(context.state);
    if (only.state != kNone) {
      const float known = hit(context, 1);
      if (known >= 0.5f) {  // all others together are no likelier
        raw *= known;
        if (raw < min_raw_) return;
        take(only.token, i - 1, raw);
        context = going_on({only.state, context.length + 1, 0});
        continue;
      }
    }
    blend(context, &candidates);
    const int best = candidates.most_likely();
    raw *= candidates.probability[best];
    if (raw < min_raw_) return;
    take(candidates.token[best], i - 1, raw);
    const Context& from = candidates.chain[candidates.known_by[best]];
    context = going_on({text_->step(from.state, candidates.token[best]), from.length + 1, 0});
  }
}

// Field by field: a node put together elsewhere and copied here waits for its own stores.
void Drafter::take(Token token, std::int32_t parent, float raw) {
  DraftNode& node = nodes_.emplace_back();
  node.token = token;
  node.parent = parent;
  node.raw = raw;
}

void Drafter::tree(const Context& start) {
  pending_.clear();
  heap_.clear();
  expand(start, 1, -1);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    const Pending best = pending_[~static_cast<std::uint32_t>(heap_.back())];
    heap_.pop_back();
    if (best.token == kNoToken) {
      expand_rest(best);
      continue;
    }
    take(best.token, best.parent, best.raw);
    if (static_cast<int>(nodes_.size()) == budget_) return;
    const Context next = going_on({text_->step(best.from.state, best.token), best.from.length + 1, 0});
    if (next.exists()) expand(next, best.raw, static_cast<std::int32_t>(nodes_.size()) - 1);
  }
}

void Drafter::expand(const Context& context, float raw, std::int32_t parent) {
  const SuffixAutomaton::Successor only = text_->only_successor(context.state);
  if (only.state != kNone) {
    const float known = hit(context, 1);
    push(raw * known, only.token, parent, context);
    push(raw * (1 - known), kNoToken, parent, context);
    return;
  }
  Candidates candidates;
  blend(context, &candidates);
  push_best(candidates, options_.paths, raw, parent);
}

void Drafter::expand_rest(Pending rest) {
  Candidates candidates;
  blend(rest.from, &candidates);
  const Token only = text_->only_successor(rest.from.state).token;
  candidates.remove(static_cast<int>(std::find(candidates.token, candidates.token + candidates.size, only) -
                                     candidates.token));
  push_best(candidates, options_.paths - 1, rest.raw / (1 - hit(rest.from, 1)), rest.parent);
}

// Puts the likeliest `most` of the candidates under a node of confidence `raw`.
void Drafter::push_best(Candidates& candidates, int most, float raw, std::int32_t parent) {
  most = std::min(most, budget_ - static_cast<int>(nodes_.size()));
  for (; most > 0 && candidates.size > 0; --most) {
    const int best = candidates.most_likely();
    push(raw * candidates.probability[best], candidates.token[best], parent,
         candidates.chain[candidates.known_by[best]]);
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

// Of equals, the last: followers come in order of discovery, and the more recent one is right more often (up to 4% of
// the accepted length where there is little text).
int Drafter::Candidates::most_likely() const {
  int best = 0;
  for (int i = 1; i < size; ++i) {
    if (probability[i] >= probability[best]) best = i;
  }
  return best;
}

void Drafter::Candidates::remove(int index) {
  --size;
  token[index] = token[size];
  probability[index] = probability[size];
  known_by[index] = known_by[size];
}

// Asked of a context that has followers, as all are that `going_on` returns; so there is at least one candidate.
void Drafter::blend(const Context& longest, Candidates* out) const {
  int depth = 0;
  for (Context context = longest; context.exists() && depth < kContexts; context = going_on(shorter(context))) {
    out->chain[depth++] = context;
  }
  out->size = 0;
  while (depth > 0) add_context(--depth, out);
}

// Turns the estimate Q of the shorter contexts into the estimate P with this one.
void Drafter::add_context(int index, Candidates* out) const {
  const Context& context = out->chain[index];
  SuffixAutomaton::Follower followers[SuffixAutomaton::kMaxFollowers];
  std::uint32_t total;
  const int known = text_->followers(context.state, followers, &total);
  int place[SuffixAutomaton::kMaxFollowers];  // of each follower among the candidates
  float inside = 0;                           // Q(F)
  int size = out->size;
  for (int f = 0; f < known; ++f) {
    int k = 0;
    while (k < size && out->token[k] != followers[f].token) ++k;
    if (k == size) {
      out->token[size] = followers[f].token;
      out->probability[size++] = 0;
    }
    place[f] = k;
    inside += out->probability[k];
  }
  out->size = size;
  const float hit_rate = hit(context, text_->degree(context.state));
  const float weight = inside > 0 ? kShorterWeight * known : 0;
  const float per_count = hit_rate / (total + weight);
  const float per_shorter = inside > 0 ? per_count * weight / inside : 0;
  const float outside = (1 - hit_rate) / std::max(1 - inside, 1e-6f);
  float share[SuffixAutomaton::kMaxFollowers];
  for (int f = 0; f < known; ++f) {
    share[f] = per_count * followers[f].count + per_shorter * out->probability[place[f]];
  }
  for (int k = 0; k < size; ++k) out->probability[k] *= outside;
  for (int f = 0; f < known; ++f) {
    out->probability[place[f]] = share[f];
    out->known_by[place[f]] = static_cast<std::uint8_t>(index);
  }
}

}  // namespace seer::drafting
