#include "drafter.h"

#include <algorithm>

namespace seer::drafting {

const std::vector<DraftNode>& Drafter::draft(const SuffixAutomaton& text, const Sequence& sequence, int budget,
                                             const DraftOptions& options) {
  text_ = &text;
  const State longest = text.link(sequence.tail);
  collect(longest, text.length(longest), options);
  return run(budget, options);
}

const std::vector<DraftNode>& Drafter::draft_after(const SuffixAutomaton& text, const Token* context,
                                                   std::size_t size, int budget, const DraftOptions& options) {
  text_ = &text;
  State state;
  std::uint32_t matched;
  text.match(context, size, &state, &matched);
  collect(state, matched, options);
  return run(budget, options);
}

// The contexts to blend: the state itself if it has followers, then its links. A state whose every string is longer
// than match_max is passed over; one that straddles it counts as match_max tokens long.
void Drafter::collect(State state, std::uint32_t matched, const DraftOptions& options) {
  start_.size = 0;
  for (; state != kRoot && matched >= options.match_min && start_.size < kAnchors; matched = text_->length(state)) {
    const State link = text_->link(state);
    if (text_->length(link) < options.match_max) {
      const std::uint32_t length = std::min(matched, options.match_max);
      if (length >= options.match_min && text_->degree(state) > 0) start_.anchor[start_.size++] = {state, length};
    }
    state = link;
  }
}

const std::vector<DraftNode>& Drafter::run(int budget, const DraftOptions& options) {
  nodes_.clear();
  if (start_.size == 0 || budget <= 0) return nodes_;
  const float min_raw = options.min_confidence > 0 ? calibration_.invert(options.min_confidence) : 0;
  if (options.paths <= 1) {
    linear(budget, min_raw);
  } else {
    tree(budget, min_raw, options.paths);
  }
  return nodes_;
}

void Drafter::linear(int budget, float min_raw) {
  Candidate candidates[kMaxCandidates];
  Anchors here = start_, after;
  float raw = 1;
  for (int i = 0; i < budget && here.size > 0; ++i) {
    const int size = blend(here, candidates);
    if (size == 0) return;
    const Candidate best = candidates[most_likely(candidates, size)];
    raw *= best.probability;
    if (raw < min_raw) return;
    nodes_.push_back({best.token, i - 1, raw});
    advance(here, best.token, &after);
    here = after;
  }
}

void Drafter::tree(int budget, float min_raw, int paths) {
  const auto less_likely = [](const Pending& a, const Pending& b) { return a.raw < b.raw; };
  heap_.clear();
  expanded_.clear();
  expanded_.push_back(start_);
  expand(0, 1.0f, -1, min_raw, paths);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), less_likely);
    const Pending best = heap_.back();
    heap_.pop_back();
    nodes_.push_back({best.token, best.parent, best.raw});
    if (static_cast<int>(nodes_.size()) == budget) return;
    Anchors after;
    advance(expanded_[best.anchors], best.token, &after);
    if (after.size == 0) continue;
    expanded_.push_back(after);
    expand(static_cast<int>(expanded_.size()) - 1, best.raw, static_cast<std::int32_t>(nodes_.size()) - 1, min_raw,
           paths);
  }
}

void Drafter::expand(int anchors, float raw, std::int32_t parent, float min_raw, int paths) {
  const auto less_likely = [](const Pending& a, const Pending& b) { return a.raw < b.raw; };
  Candidate candidates[kMaxCandidates];
  int size = blend(expanded_[anchors], candidates);
  for (int k = 0; k < paths && size > 0; ++k) {
    const int best = most_likely(candidates, size);
    const float child = raw * candidates[best].probability;
    if (child < min_raw) return;
    heap_.push_back({child, candidates[best].token, parent, anchors});
    std::push_heap(heap_.begin(), heap_.end(), less_likely);
    candidates[best] = candidates[--size];
  }
}

// Of equals, the last: followers come in order of discovery, and the more recent one is right more often (up to 4% of
// the accepted length where there is little text).
int Drafter::most_likely(const Candidate* candidates, int size) {
  int best = 0;
  for (int i = 1; i < size; ++i) {
    if (candidates[i].probability >= candidates[best].probability) best = i;
  }
  return best;
}

int Drafter::blend(const Anchors& anchors, Candidate* out) const {
  int size = 0;
  SuffixAutomaton::Follower followers[SuffixAutomaton::kMaxFollowers];
  for (int i = anchors.size - 1; i >= 0; --i) {
    const Anchor& anchor = anchors.anchor[i];
    std::uint32_t total;
    const int known = text_->followers(anchor.state, followers, &total);
    if (known == 0) continue;
    const float hit = hits_.probability(anchor.length, total, text_->degree(anchor.state));
    for (int k = 0; k < size; ++k) out[k].probability *= 1 - hit;
    for (int f = 0; f < known; ++f) {
      const float share = hit * followers[f].count / total;
      int k = 0;
      while (k < size && out[k].token != followers[f].token) ++k;
      if (k == size) {
        out[size++] = {followers[f].token, share};
      } else {
        out[k].probability += share;
      }
    }
  }
  return size;
}

void Drafter::advance(const Anchors& from, Token token, Anchors* to) const {
  to->size = 0;
  for (int i = 0; i < from.size; ++i) {
    const State state = text_->step(from.anchor[i].state, token);
    if (state != kNone) add(to, state, from.anchor[i].length + 1);
  }
}

// Adds a context, kept longest first and each state once. One without followers is the end of a response (or of
// several at the same text): its longest suffix that goes on stands in for it.
void Drafter::add(Anchors* anchors, State state, std::uint32_t length) const {
  while (text_->degree(state) == 0) {
    state = text_->link(state);
    if (state == kRoot) return;
    length = std::min(length, text_->length(state));
  }
  int at = anchors->size;
  for (int i = 0; i < anchors->size; ++i) {
    if (anchors->anchor[i].state == state) return;
    if (anchors->anchor[i].length < length) at = std::min(at, i);
  }
  for (int i = anchors->size; i > at; --i) anchors->anchor[i] = anchors->anchor[i - 1];
  anchors->anchor[at] = {state, length};
  ++anchors->size;
}

}  // namespace seer::drafting
