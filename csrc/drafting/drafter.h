// SPDX-License-Identifier: Apache-2.0
// From a context in a group's automaton to a draft: the estimate of what comes next, taken greedily or best-first.
//
// A node's confidence is the product of P (see Estimate) along its path, corrected by Calibration. After a token, the
// contexts are those of the longest one that knew it, one token on; at the end of a response a context continues at its
// link, which is what lets a draft follow a loop for more than one period.
//
// Linear drafts take the best token each time. Several are made together, a token each in turn: a step reads memory
// that only the step before made known, mostly far from it, and while one draft's is on its way the others go on.
//
// Trees expand the most confident node first, with at most `paths` children each; so nodes come out in falling
// confidence, parents before children, and any prefix is a valid tree.
//
// Where the longest context has one follower, P of that follower is h, whatever the shorter contexts say. Most steps
// are of this kind; they read one state. What the shorter ones offer, 1 - h at most in sum, is looked at only when
// asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "automaton.h"
#include "calibration.h"
#include "estimate.h"
#include "hit_table.h"

namespace seer::drafting {

struct DraftOptions {
  std::int32_t paths = 1;                // children per fork; 1 is a linear draft
  float min_confidence = 0;              // nodes below are not drafted
  std::uint32_t match_min = 1;           // shortest context worth drafting from (the paper's pattern_lookup_min)
  std::uint32_t match_max = UINT32_MAX;  // longest context considered (pattern_lookup_max)
};

// Where a draft goes: the caller's arrays, with room for the budget each. Parents come before children.
struct DraftRow {
  Token* tokens;
  std::int32_t* parents;  // index of an earlier node, or -1
  float* confidence;
};

// Scratch space of one thread for one batch: it corrects by the map of the moment it was made.
class Drafter {
 public:
  // Drafts made together at most: half as many are 5% slower, twice as many are no faster.
  static constexpr int kTogether = 16;

  Drafter(const HitTable& hits, const Calibration& calibration) : hits_(hits), calibration_(calibration.map()) {}

  // One draft: what may follow a response.
  struct Job {
    const SuffixAutomaton* text;
    const Sequence* sequence;
    int budget;
    DraftRow out;
    int size;  // nodes drafted, written here
  };
  // Makes up to kTogether drafts. Confidences are raw: `calibration` corrects them.
  void draft(Job* jobs, int count, const DraftOptions& options);
  // Drafts what may follow a context that need not be in the index, and returns the number of nodes.
  int draft_after(const SuffixAutomaton& text, const Token* context, std::size_t size, int budget,
                  const DraftOptions& options, const DraftRow& out);

  const Calibration::Map& calibration() const { return calibration_; }

 private:
  // A context's only follower that comes next with this probability needs no comparison: all others together are no
  // likelier.
  static constexpr float kCertain = 0.5f;

  // A draft under way.
  struct Walk {
    ContextReader reader;
    Context context;  // from which the next token is drafted; none: there is no next token
    float raw;        // confidence of the latest node of a linear draft
    int size;
    int budget;
    DraftRow out;

    bool ended() const { return size == budget || !context.exists(); }
    void end() { context = Context(); }
    void take(Token token, std::int32_t parent, float confidence) {
      out.tokens[size] = token;
      out.parents[size] = parent;
      out.confidence[size] = confidence;
      ++size;
    }
  };
  struct Pending {  // a node not yet taken into the tree
    Token token;    // kNoToken: what else may follow `from`, besides its only follower; `raw` bounds their sum
    std::int32_t parent;
    float raw;
    Context from;  // the longest context that knows the token
  };
  // A pending node in the heap: its confidence's bits above the complement of its index in pending_, so that of equals
  // the first found goes first. Bits of positive floats order like the floats, and a word moves faster than a struct.
  using Rank = std::uint64_t;

  void set(const DraftOptions& options);
  void start(Walk& walk, State state, std::uint32_t matched, std::uint32_t own) const;
  void run(int count);

  void linear(int count);
  bool advance(Walk& walk) const;
  bool follow_response(Walk& walk) const;
  bool extend(Walk& walk, float probability, Token token) const;
  void choose(Walk& walk, Estimate& estimate) const;

  void tree(Walk& walk);
  void expand(const Walk& walk, const Context& context, float raw, std::int32_t parent);
  void expand_rest(const Walk& walk, Pending rest);
  void push_best(const Walk& walk, Candidates& candidates, int most, float raw, std::int32_t parent);
  void push(float raw, Token token, std::int32_t parent, const Context& from);

  const HitTable& hits_;
  const Calibration::Map calibration_;
  DraftOptions options_;
  float min_raw_ = 0;
  Walk walks_[kTogether];
  Estimate estimates_[kTogether];
  std::vector<Pending> pending_;
  std::vector<Rank> heap_;
};

}  // namespace seer::drafting
