// SPDX-License-Identifier: Apache-2.0
// Suffix automaton of one group: every substring of every response, with exact occurrence counts.
//
// Read this first
//   A state stands for all strings that end at the same set of positions. Its longest string has length `length`; its
//   suffix link leads to the state of the longest suffix that ends at more positions. Following an edge appends one
//   token. Two kinds of state:
//
//   spine   the prefix of a response that ends at one position. Each response starts, in thought, with a private symbol,
//           so a prefix occurs once and has one successor: the next position. It needs no node. It is the token log
//           itself plus one link, 8 bytes a token. State number = position, >= 0.
//   branch  a string that occurs at least twice with different left neighbours. An explicit node: link, length, count,
//           edges. State number = ~index, < 0. The root (empty string) is branch 0.
//
//   So a draft for a running request needs no matching: the longest suffix of its tokens that occurs anywhere else
//   is the link of its last position, one load; the shorter ones are the links after that.
//
// Positions live in blocks of kBlock entries, the last of which is a jump to the response's next block:
//
//        position   0      1      2   ...  126   | 127
//        token      BEGIN  t0     t1  ...  t125  | kJump, link = first position of the next block, or kNone
//
//   Every response begins with the token kBegin, the same for all, and then the last few tokens of the prompt if they are
//   known. "What do siblings start with" thus is an ordinary context. kBegin never follows anything, so it is never
//   drafted.
//
// Invariants (check_integrity)
//   1. A branch is longer than its link; the root alone has no link; every spine position links to a branch.
//   2. An edge of p by token t leads to a state whose strings end in t and whose longest string is longer than p's.
//   3. The count of a branch is the number of positions its string ends at, unless more than kMaxCounted states had to
//      be raised for one token (a loop): then it is a lower bound.
//   4. The header of a wide branch holds the largest counts among its followers.
//   5. A count is never below that of a branch linking to it (while 3 is exact).
//
// Not thread-safe; the owner locks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "edge_store.h"
#include "growing_array.h"
#include "hit_table.h"

namespace seer::drafting {

using State = std::int32_t;
using Token = std::int32_t;

constexpr State kNone = INT32_MIN;
constexpr State kRoot = -1;
constexpr Token kBegin = -1;

// One response: where its log starts and ends.
struct Sequence {
  State first = kNone;       // position of kBegin
  State tail = kNone;        // last position written
  State shortest = kRoot;    // shortest context of the tail when it was written; kRoot: none, kNone: not known
  std::uint32_t lead = 0;    // tokens of the prompt's end between kBegin and the response's first token
  std::uint32_t length = 0;  // tokens of the response itself
};

class SuffixAutomaton {
 public:
  // Counts of at most this many contexts are raised per token. Ordinary text raises 3 to 14; in a loop the chain
  // grows with the loop (4,285 states on 60k tokens of period 7), which would make appending quadratic.
  static constexpr int kMaxCounted = 64;
  // Contexts per token shown to the hit table: as many as drafting blends.
  static constexpr int kMaxObserved = 3;
  // Positions and branches share 32 bits with their sign.
  static constexpr std::size_t kMaxPositions = std::size_t{1} << 30;

  SuffixAutomaton();

  // Starts a response whose prompt ends with these tokens.
  Sequence begin(const Token* lead, std::size_t size);
  // Appends one token (>= 0) to a response. `hits`, if not null, learns which contexts had seen the token follow and
  // which had not: the construction visits exactly these. Throws std::length_error past kMaxPositions.
  void append(Sequence& sequence, Token token, HitTable* hits);

  // ---- reading
  bool is_branch(State state) const { return state < 0; }
  std::uint32_t count(State state) const { return is_branch(state) ? branch(state).count : 1; }
  // Length of a branch's longest string.
  std::uint32_t length(State state) const { return branch(state).length; }
  State link(State state) const { return is_branch(state) ? branch(state).link : spine_[state].link; }
  Token token(State position) const { return spine_[position].token; }
  // Position after this one in the same response, or kNone at its end.
  State next(State position) const {
    const Position& after = spine_[position + 1];
    if (after.token >= 0) return position + 1;
    return after.token == kJump ? after.link : kNone;
  }
  std::uint32_t degree(State state) const {
    if (is_branch(state)) return branch(state).edges.degree;
    return next(state) == kNone ? 0 : 1;
  }
  struct Successor {
    Token token = kNoToken;
    State state = kNone;
  };
  // The one token that ever followed, and where it leads; kNone if none or several did.
  Successor only_successor(State state) const {
    if (is_branch(state)) {
      const EdgeList& edges = branch(state).edges;
      return edges.degree == 1 ? Successor{edges.only.token, edges.only.target} : Successor();
    }
    const State after = next(state);
    return after == kNone ? Successor() : Successor{spine_[after].token, after};
  }
  // Have a state's memory, or that of its edges, on its way before it is read. The second reads the state.
  void prefetch(State state) const {
    if (is_branch(state)) {
      __builtin_prefetch(&branch(state));
    } else {
      __builtin_prefetch(&spine_[state]);
    }
  }
  void prefetch_edges(State state) const {
    if (is_branch(state)) __builtin_prefetch(edges_.narrow(branch(state).edges));
  }
  // State reached by one token, or kNone.
  State step(State state, Token token) const;

  // Most followers listed of a state: a narrow list's length, or a wide one's header.
  static constexpr int kMaxFollowers = 16;
  // What a state says about the next token. Valid until the next append, and where it is.
  struct Followers {
    const Edge* edges;  // `size` of them: tokens, and unless `wide` what they lead to
    int size;           // all followers, or the most frequent ones of a wide state
    bool wide;
    std::uint32_t degree;               // followers, listed or not
    std::uint32_t seen;                 // occurrences of the state itself
    std::int32_t total;                 // count of all followers
    std::int32_t count[kMaxFollowers];  // of each one listed
    Edge next;                          // the edge of a spine position
  };
  void followers(State state, Followers* out) const {
    if (is_branch(state)) {
      branch_followers(branch(state), out);
    } else {
      spine_followers(state, out);
    }
  }

  // Copies tokens [from, from + count) of a response.
  void copy_tokens(const Sequence& sequence, std::uint32_t from, std::uint32_t count, Token* out) const;
  // Whether tokens [from, from + count) of a response equal these.
  bool same_tokens(const Sequence& sequence, std::uint32_t from, std::uint32_t count, const Token* tokens) const;

  // Walks a context from the root and leaves the state of its longest suffix that occurs, and that suffix's length.
  void match(const Token* context, std::size_t size, State* state, std::uint32_t* matched) const;

  std::size_t bytes() const { return spine_.bytes() + branches_.bytes() + edges_.bytes(); }
  std::size_t num_branches() const { return branches_.size(); }

  // Empty when every invariant holds, else the first one broken. For tests: takes time linear in the structure.
  std::string check_integrity() const;

 private:
  static constexpr int kBlock = 128;
  static constexpr Token kJump = -2;

  struct Position {
    Token token;  // kNoToken: not written yet; what comes after that is not initialised
    State link;   // longest suffix of this prefix that occurs elsewhere too: a branch
  };
  struct Branch {
    State link;            // longest suffix with more occurrences; kNone for the root
    std::uint32_t length;  // of the longest string of this state
    std::uint32_t count;   // occurrences, ends of responses included
    EdgeList edges;
  };
  static_assert(sizeof(Branch) == 24, "24 bytes a branch, its only edge included, is what keeps a token at about 30");

  Branch& branch(State state) { return branches_[static_cast<std::size_t>(~state)]; }
  const Branch& branch(State state) const { return branches_[static_cast<std::size_t>(~state)]; }

  void branch_followers(const Branch& from, Followers* out) const;
  void spine_followers(State position, Followers* out) const;
  State new_position(Sequence& sequence, Token token);
  void insert_edge(State from, Token token, State to);
  State clone(State original, std::uint32_t length);
  void redirect(State from, Token token, State old_target, State new_target);
  bool has_wide_suffix(State shortest) const;
  State raise_counts(State state, State context, Token token, bool wide);

  GrowingArray<Position> spine_;
  GrowingArray<Branch> branches_;
  EdgeStore edges_;
  std::size_t num_wide_ = 0;  // branches other than the root with a header to keep
};

}  // namespace seer::drafting
