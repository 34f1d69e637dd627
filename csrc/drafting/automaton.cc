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
  State target = kNone;
  int observed = 0;
  for (; context != kNone; context = branch(context).link) {
    const Branch& from = branch(context);
    const Edge* edge = edges_.find(from.edges, token);
    if (hits != nullptr && context != kRoot && from.edges.degree > 0 && observed < kMaxObserved) {
      ++observed;
      hits->observe(from.length, std::max(from.count, 2u) - 1, from.edges.degree, edge != nullptr);
    }
    if (edge != nullptr) {
      target = edge->target;
      break;
    }
    insert_edge(context, token, here);
  }

  if (context == kNone) {
    spine_[here].link = kRoot;
    return;
  }
  const std::uint32_t length = branch(context).length + 1;
  if (!is_branch(target) || branch(target).length != length) {
    // `target` also stands for longer strings that do not end here: split off the part that does.
    const State split = clone(target, length);
    redirect(context, token, target, split);
    target = split;
  }
  spine_[here].link = target;
  raise_counts(target, context, token);
}

State SuffixAutomaton::new_position(Sequence& sequence, Token token) {
  State here;
  const bool fits = sequence.tail != kNone && spine_[sequence.tail + 1].token == kNoToken;
  if (fits) {
    here = sequence.tail + 1;
  } else {
    if (spine_.size() + kBlock > kMaxPositions) throw std::length_error("draft index: a group has too many tokens");
    here = static_cast<State>(spine_.take(kBlock));
    for (int i = 0; i < kBlock - 1; ++i) spine_[here + i] = Position{kNoToken, kRoot};
    spine_[here + kBlock - 1] = Position{kJump, kNone};
    if (sequence.tail != kNone) spine_[sequence.tail + 1].link = here;
  }
  spine_[here].token = token;
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
  if (is_branch(original)) {
    const EdgeList edges = edges_.copy(branch(original).edges);
    branch(twin) = Branch{branch(original).link, length, branch(original).count, edges};
    branch(original).link = twin;
    if (edges.wide()) ++num_wide_;
    return twin;
  }
  branch(twin) = Branch{spine_[original].link, length, 1, EdgeList()};
  spine_[original].link = twin;
  const State after = next(original);
  if (after != kNone) insert_edge(twin, spine_[after].token, after);
  return twin;
}

void SuffixAutomaton::redirect(State from, Token token, State old_target, State new_target) {
  for (; from != kNone; from = branch(from).link) {
    Edge* edge = edges_.find(branch(from).edges, token);
    if (edge == nullptr || edge->target != old_target) return;
    edge->target = new_target;
  }
}

// One more occurrence of `state` and of all its suffixes. Their counts are follower counts of the contexts before the
// token, and the two link chains run in step: a context s leads to the state t with length(link(t)) <= length(s) <
// length(t). So wide contexts learn the new count of their follower without looking it up. Contexts longer than
// `context` have just met the token for the first time; a count of one changes no header.
void SuffixAutomaton::raise_counts(State state, State context, Token token) {
  for (int i = 0; i < kMaxCounted && state != kRoot; ++i) {
    Branch& raised = branch(state);
    ++raised.count;
    state = raised.link;
    if (num_wide_ == 0) continue;
    const std::uint32_t shortest = branch(state).length;
    while (context != kRoot && branch(context).length >= shortest) {
      const Branch& from = branch(context);
      if (from.edges.wide()) edges_.raise_top(from.edges, token, raised.count);
      context = from.link;
    }
  }
}

std::uint32_t SuffixAutomaton::degree(State state) const {
  if (is_branch(state)) return branch(state).edges.degree;
  return next(state) == kNone ? 0 : 1;
}

State SuffixAutomaton::step(State state, Token token) const {
  if (is_branch(state)) {
    const Edge* edge = edges_.find(branch(state).edges, token);
    return edge == nullptr ? kNone : edge->target;
  }
  const State after = next(state);
  return after != kNone && spine_[after].token == token ? after : kNone;
}

int SuffixAutomaton::followers(State state, Follower* out, std::uint32_t* total) const {
  *total = 0;
  if (!is_branch(state)) {
    const State after = next(state);
    if (after == kNone) return 0;
    out[0] = Follower{spine_[after].token, 1};
    *total = 1;
    return 1;
  }
  const Branch& from = branch(state);
  int size = 0;
  if (from.edges.wide()) {
    const Edge* top = edges_.top(from.edges);
    for (int i = 0; i < EdgeStore::kTop; ++i) {
      if (top[i].target == 0) continue;
      out[size++] = Follower{top[i].token, static_cast<std::uint32_t>(top[i].target)};
      *total += static_cast<std::uint32_t>(top[i].target);
    }
    // The rest of the followers are not listed but they did follow; at most the ends of responses are miscounted.
    *total = std::max(*total, from.count > 1 ? from.count - 1 : 1);
    return size;
  }
  if (from.edges.degree == 0) return 0;
  const Edge* edge = edges_.narrow(from.edges);
  for (std::uint32_t i = 0; i < from.edges.degree; ++i) {
    const std::uint32_t seen = count(edge[i].target);
    out[size++] = Follower{edge[i].token, seen};
    *total += seen;
  }
  return size;
}

void SuffixAutomaton::copy_tokens(const Sequence& sequence, std::uint32_t from, std::uint32_t count,
                                  Token* out) const {
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
    if (b.link != kNone && (!is_branch(b.link) || branch(b.link).length >= b.length)) return name + ": link not shorter";
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
    if (!b.edges.wide() || i == 0) continue;  // nobody drafts from the root: its header is not kept
    std::vector<std::uint32_t> listed;
    for (int k = 0; k < EdgeStore::kTop; ++k) {
      listed.push_back(static_cast<std::uint32_t>(edges_.top(b.edges)[k].target));
    }
    std::sort(listed.begin(), listed.end());
    std::sort(largest, largest + EdgeStore::kTop);
    if (!std::equal(listed.begin(), listed.end(), largest)) return name + ": header is not the top followers";
  }
  for (std::size_t at = 0; at < spine_.size(); ++at) {
    const Position& p = spine_[at];
    if (p.token == kNoToken || p.token == kJump) continue;
    if (!is_branch(p.link) || p.link == kNone) return "position " + std::to_string(at) + ": link is not a branch";
  }
  return "";
}

}  // namespace seer::drafting
