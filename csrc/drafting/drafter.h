// From a context in a group's automaton to a draft: a blend over the suffix-link chain, then greedy or best-first.
//
// Estimate. Take up to kAnchors contexts of the tail that have followers, longest first. With c(t) the count of
// follower t of context i, n its followers' total and h the learned probability that the context knows the next token,
//
//     P_i(t) = h_i * c_i(t) / n_i + (1 - h_i) * P_{i+1}(t)
//
// A node's confidence is the product of P along its path, corrected by Calibration. After a token all contexts step by
// it; those that cannot are dropped, and one that runs off the end of a response continues at its link, which is what
// lets a draft follow a loop for more than one period.
//
// Linear drafts take the best token each time. Trees expand the most confident node first, with at most `paths`
// children each; so nodes come out in falling confidence, parents before children, and any prefix is a valid tree.
#pragma once

#include <cstdint>
#include <vector>

#include "automaton.h"
#include "calibration.h"
#include "hit_table.h"

namespace seer::drafting {

struct DraftOptions {
  std::int32_t paths = 1;             // children per fork; 1 is a linear draft
  float min_confidence = 0;           // nodes below are not drafted
  std::uint32_t match_min = 1;        // shortest context worth drafting from (the paper's pattern_lookup_min)
  std::uint32_t match_max = UINT32_MAX;  // longest context considered (pattern_lookup_max)
};

struct DraftNode {
  Token token;
  std::int32_t parent;  // index of an earlier node, or -1
  float raw;            // confidence before correction
};

// Scratch space of one thread; holds the latest draft.
class Drafter {
 public:
  Drafter(const HitTable& hits, const Calibration& calibration) : hits_(hits), calibration_(calibration) {}

  // Drafts what may follow the response; the result is valid until the next call.
  const std::vector<DraftNode>& draft(const SuffixAutomaton& text, const Sequence& sequence, int budget,
                                      const DraftOptions& options);
  // Drafts what may follow a context that need not be in the index.
  const std::vector<DraftNode>& draft_after(const SuffixAutomaton& text, const Token* context, std::size_t size,
                                            int budget, const DraftOptions& options);

 private:
  static constexpr int kAnchors = 4;  // 6 and 12 gave the same accepted length

  struct Anchor {
    State state;
    std::uint32_t length;  // matched tokens, drafted ones included
  };
  struct Anchors {  // longest first
    int size = 0;
    Anchor anchor[kAnchors];
  };
  struct Candidate {
    Token token;
    float probability;
  };
  struct Pending {  // a node not yet taken into the tree
    float raw;
    Token token;
    std::int32_t parent;
    std::int32_t anchors;  // index into expanded_: the contexts before this token
  };
  static constexpr int kMaxCandidates = kAnchors * SuffixAutomaton::kMaxFollowers;

  void collect(State state, std::uint32_t matched, const DraftOptions& options);
  const std::vector<DraftNode>& run(int budget, const DraftOptions& options);
  void linear(int budget, float min_raw);
  void tree(int budget, float min_raw, int paths);
  void expand(int anchors, float raw, std::int32_t parent, float min_raw, int paths);
  static int most_likely(const Candidate* candidates, int size);
  int blend(const Anchors& anchors, Candidate* out) const;
  void advance(const Anchors& from, Token token, Anchors* to) const;
  void add(Anchors* anchors, State state, std::uint32_t length) const;

  const HitTable& hits_;
  const Calibration& calibration_;
  const SuffixAutomaton* text_ = nullptr;
  Anchors start_;
  std::vector<DraftNode> nodes_;
  std::vector<Pending> heap_;
  std::vector<Anchors> expanded_;
};

}  // namespace seer::drafting
