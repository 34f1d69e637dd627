// SPDX-License-Identifier: Apache-2.0
#include "automaton.h"

#include <algorithm>
#include <stdexcept>

namespace seer::drafting {

SuffixAutomaton::SuffixAutomaton() {
  const std::size_t root = branches_.take(1);
  branches_[root] = Branch{kNone, 0, 0, EdgeList()};
}

Sequence SuffixAutomaton::begin(const Token* lead, std::size_t size) {
  Sequence sequence;
  append(sequence, kBegin, nullptr);
  sequence.first = sequence.tail;
  for (std::size_t i = 0; i < size; ++i) append(sequence, lead[i], nullptr);
  sequence.lead = static_cast<std::uint32_t>(size);
  sequence.length = 0;
  return sequence;
}

// One step of the online construction, started from the response's own tail. It is valid in any order of growth,
// because a tail is a prefix with a private start symbol: nothing another response does can move it.
void SuffixAutomaton::append(Sequence& sequence, Token token, HitTable* hits) {
  const State old_tail = sequence.tail;
  const State here = new_position(sequence, token);

  // Every context of the old tail that has not seen `token` follow learns of this occurrence.
  State context = old_tail == kNone ? kRoot : spine_[old_tail].link;
  Edge* edge = nullptr;
  int observed = 0;
  for (; context != kNone; context = branch(context).link) {
    Branch& from = branch(context);
    edge = edges_.find(from.edges, token);
    if (hits != nullptr && context != kRoot && from.edges.degree > 0 && observed < kMaxObserved) {
      ++observed;
      hits->observe(from.length, std::max(from.count, 2u) - 1, from.edges.degree, edge != nullptr);
    }
    if (edge != nullptr) break;
    insert_edge(context, token, here);
  }

  if (context == kNone) {
    spine_[here].link = kRoot;
    sequence.shortest = kRoot;
    return;
  }
  const std::uint32_t length = branch(context).length + 1;
  State target = edge->target;
  if (!is_branch(target) || branch(target).length != length) {
    // `target` also stands for longer strings that do not end here: split off the part that does. The twin's number is
    // known before it is made, and `target`, longer than any context, is none of those redirected.
    const State twin = ~static_cast<State>(branches_.size());
    edge->target = twin;
    redirect(branch(context).link, token, target, twin);
    clone(target, length);
    target = twin;
  }
  spine_[here].link = target;
  sequence.shortest = raise_counts(target, context, token, has_wide_suffix(sequence.shortest));
}

State SuffixAutomaton::new_position(Sequence& sequence, Token token) {
  State here;
  const bool fits = sequence.tail != kNone && spine_[sequence.tail + 1].token == kNoToken;
  if (fits) {
    here = sequence.tail + 1;
  } else {
    if (spine_.size() + kBlock > kMaxPositions) throw std::length_error("draft index: a group has too many tokens");
    here = static_cast<State>(spine_.take(kBlock));
    spine_[here + kBlock - 1] = Position{kJump, kNone};
    if (sequence.tail != kNone) spine_[sequence.tail + 1].link = here;
  }
  spine_[here].token = token;
  if ((here + 1) % kBlock != kBlock - 1) spine_[here + 1].token = kNoToken;
  sequence.tail = here;
  ++sequence.length;
  return here;
}

void SuffixAutomaton::insert_edge(State from, Token token, State to) {
  EdgeList& edges = branch(from).edges;
  const bool was_wide = edges.wide();
  edges_.insert(edges, Edge{token, to}, [this](State target) { return count(target); });
  if (!was_wide && edges.wide() && from != kRoot) ++num_wide_;
}

State SuffixAutomaton::clone(State original, std::uint32_t length) {
  const State twin = ~static_cast<State>(branches_.take(1));
  // Field by field, here and in EdgeStore::copy: a struct that is built first and then copied waits for its own stores.
  Branch& made = branch(twin);
  made.length = length;
  if (is_branch(original)) {
    Branch& from = branch(original);
    made.link = from.link;
    made.count = from.count;
    edges_.copy(from.edges, &made.edges);
    if (made.edges.wide()) ++num_wide_;
    from.link = twin;
    return twin;
  }
  made.link = spine_[original].link;
  made.count = 1;
  spine_[original].link = twin;
  const State after = next(original);
  made.edges.set_only(after == kNone ? kNoToken : spine_[after].token, after);
  return twin;
}

void SuffixAutomaton::redirect(State from, Token token, State old_target, State new_target) {
  for (; from != kNone; from = branch(from).link) {
    Edge* edge = edges_.find(branch(from).edges, token);
    if (edge == nullptr || edge->target != old_target) return;
    edge->target = new_target;
  }
}

// A context's followers also follow its suffixes. So if any context of a tail is wide, its shortest one is. Splits
// since `shortest` was noted can only have added shorter ones, which its links lead to.
bool SuffixAutomaton::has_wide_suffix(State shortest) const {
  if (num_wide_ == 0 || shortest == kRoot) return false;
  if (shortest == kNone) return true;
  while (branch(shortest).link != kRoot) shortest = branch(shortest).link;
  return branch(shortest).edges.wide();
}

// One more occurrence of `state` and of all its suffixes; returns the last of them, or kNone if they were too many.
// Their counts are follower counts of the contexts before the token, and the two link chains run in step: a context s
// leads to the state t with length(link(t)) <= length(s) < length(t). So wide contexts learn the new count of their
// follower without looking it up. Contexts longer than `context` have just met the token for the first time; a count of
// one changes no header.
State SuffixAutomaton::raise_counts(State state, State context, Token token, bool wide) {
  State last = kRoot;
  for (int i = 0; i < kMaxCounted && state != kRoot; ++i) {
    Branch& raised = branch(state);
    ++raised.count;
    last = state;
    state = raised.link;
    if (!wide) continue;
    const std::uint32_t shortest = branch(state).length;
    while (context != kRoot && branch(context).length >= shortest) {
      const Branch& from = branch(context);
      if (from.edges.wide()) edges_.raise_top(from.edges, token, raised.count);
      context = from.link;
    }
  }
  return state == kRoot ? last : kNone;
}

State SuffixAutomaton::step(State state, Token token) const {
  if (is_branch(state)) {
    const Edge* edge = edges_.find(branch(state).edges, token);
    return edge == nullptr ? kNone : edge->target;
  }
  const State after = next(state);
  return after != kNone && spine_[after].token == token ? after : kNone;
}

void SuffixAutomaton::spine_followers(State position, Followers* out) const {
  const State after = next(position);
  out->next.token = after == kNone ? kNoToken : spine_[after].token;
  out->next.target = after;
  out->edges = &out->next;
  out->size = after == kNone ? 0 : 1;
  out->wide = false;
  out->degree = static_cast<std::uint32_t>(out->size);
  out->seen = 1;
  out->total = out->size;
  out->count[0] = 1;
}

void SuffixAutomaton::branch_followers(const Branch& from, Followers* out) const {
  out->wide = from.edges.wide();
  out->degree = from.edges.degree;
  out->seen = from.count;
  std::int32_t total = 0;
  if (out->wide) {
    const Edge* top = edges_.top(from.edges);
    for (int i = 0; i < EdgeStore::kTop; ++i) total += out->count[i] = top[i].target;
    out->edges = top;
    out->size = EdgeStore::kTop;
    // The rest of the followers are not listed but they did follow; at most the ends of responses are miscounted.
    out->total = std::max(total, static_cast<std::int32_t>(from.count) - 1);
    return;
  }
  // No branch on what an edge leads to, which is a coin toss; so the targets' cache misses overlap.
  const Edge* edges = edges_.narrow(from.edges);
  const int degree = static_cast<int>(from.edges.degree);
  for (int i = 0; i < degree; ++i) {
    const State target = edges[i].target;
    const State or_root = is_branch(target) ? target : kRoot;
    const std::int32_t if_branch = static_cast<std::int32_t>(branch(or_root).count);
    total += out->count[i] = is_branch(target) ? if_branch : 1;
  }
  out->edges = edges;
  out->size = degree;
  out->total = total;
}

void SuffixAutomaton::copy_tokens(const Sequence& sequence, std::uint32_t from, std::uint32_t count, Token* out) const {
  State at = sequence.first;
  // kBlock - 1 positions of each block hold tokens; whole blocks are skipped by their jumps.
  std::uint32_t skip = 1 + sequence.lead + from;
  for (; skip >= kBlock - 1; skip -= kBlock - 1) {
    const State jump = spine_[at / kBlock * kBlock + kBlock - 1].link;
    if (jump == kNone) return;
    at = jump;
  }
  at += static_cast<State>(skip);
  for (std::uint32_t i = 0; i < count && at != kNone; ++i, at = next(at)) out[i] = spine_[at].token;
}

bool SuffixAutomaton::same_tokens(const Sequence& sequence, std::uint32_t from, std::uint32_t count,
                                  const Token* tokens) const {
  std::vector<Token> have(count);
  copy_tokens(sequence, from, count, have.data());
  return std::equal(have.begin(), have.end(), tokens);
}

void SuffixAutomaton::match(const Token* context, std::size_t size, State* state, std::uint32_t* matched) const {
  State at = kRoot;
  std::uint32_t length = 0;
  for (std::size_t i = 0; i < size; ++i) {
    State to = step(at, context[i]);
    while (to == kNone && at != kRoot) {
      at = link(at);
      length = branch(at).length;
      to = step(at, context[i]);
    }
    if (to == kNone) continue;
    at = to;
    ++length;
  }
  *state = at;
  *matched = length;
}

std::string SuffixAutomaton::check_integrity() const {
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    const Branch& b = branches_[i];
    const std::string name = "branch " + std::to_string(i);
    if ((b.link == kNone) != (i == 0)) return name + ": only the root has no link";
    if (b.link != kNone && (!is_branch(b.link) || branch(b.link).length >= b.length))
      return name + ": link not shorter";
    std::string broken;
    std::uint32_t degree = 0;
    std::uint32_t largest[EdgeStore::kTop] = {};
    edges_.each(b.edges, [&](const Edge& edge) {
      ++degree;
      if (is_branch(edge.target) && branch(edge.target).length <= b.length) broken = name + ": edge does not lengthen";
      if (!is_branch(edge.target) && spine_[edge.target].token != edge.token) broken = name + ": edge to another token";
      const std::uint32_t seen = count(edge.target);
      std::uint32_t* lowest = std::min_element(largest, largest + EdgeStore::kTop);
      *lowest = std::max(*lowest, seen);
    });
    if (!broken.empty()) return broken;
    if (degree != b.edges.degree) return name + ": degree does not count its edges";
    if (!b.edges.wide() || i == 0) continue;  // drafts never start at the root: its header is not kept
    std::vector<std::uint32_t> listed;
    for (int k = 0; k < EdgeStore::kTop; ++k) {
      listed.push_back(static_cast<std::uint32_t>(edges_.top(b.edges)[k].target));
    }
    std::sort(listed.begin(), listed.end());
    std::sort(largest, largest + EdgeStore::kTop);
    if (!std::equal(listed.begin(), listed.end(), largest)) return name + ": header is not the top followers";
  }
  for (std::size_t block = 0; block < spine_.size(); block += kBlock) {
    for (std::size_t at = block; spine_[at].token >= kBegin; ++at) {
      const State link = spine_[at].link;
      if (!is_branch(link) || link == kNone) return "position " + std::to_string(at) + ": link is not a branch";
    }
  }
  return "";
}

}  // namespace seer::drafting
