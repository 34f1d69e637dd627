// From a context in a group's automaton to a draft: back-off over the suffix-link chain, then greedy or best-first.
//
// Estimate. Take up to kContexts contexts that have followers, longest first. With F the followers of context i, c(t)
// the count of follower t, n their total and h the learned probability that the next token is in F given that no longer
// context knew it (PPM's escape, see HitTable), and Q the estimate of the shorter contexts,
//
//     t in F       P(t) = h * (c(t) + k * Q(t) / Q(F)) / (n + k)      k = kShorterWeight * |F|
//     otherwise    P(t) = (1 - h) * Q(t) / (1 - Q(F))
//
// The longest context that knows a token decides; shorter ones only share out what it leaves open, the more so the more
// followers compete for few counts (Witten and Bell), and what it does not know at all. Plainly mixing the contexts'
// shares counts the same evidence several times, because the occurrences of a context are among those of its suffixes.
//
// A node's confidence is the product of P along its path, corrected by Calibration. After a token, the contexts are
// those of the longest one that knew it, one token on; at the end of a response a context continues at its link, which
// is what lets a draft follow a loop for more than one period.
//
// Linear drafts take the best token each time. Trees expand the most confident node first, with at most `paths`
// children each; so nodes come out in falling confidence, parents before children, and any prefix is a valid tree.
//
// Where the longest context has one follower, P of that follower is h, whatever the shorter contexts say. Most steps
// are of this kind; they read one state. What the shorter ones offer, 1 - h at most in sum, is looked at only when
// asked for.
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
  static constexpr int kContexts = 3;  // 2 loses up to 0.1% of the accepted length, 4 and 6 gain nothing
  static constexpr float kShorterWeight = 2;

  // A state read as the string of its last `length` tokens.
  struct Context {
    State state = kRoot;
    std::uint32_t length = 0;
    std::uint32_t own = 0;  // occurrences that are the requester's own tail, which nothing follows yet: 0 or 1
    bool exists() const { return state != kRoot; }
  };
  static constexpr int kMaxCandidates = kContexts * SuffixAutomaton::kMaxFollowers;
  struct Candidates {  // what may follow chain[0], in no order
    int size = 0;
    Token token[kMaxCandidates];
    float probability[kMaxCandidates];
    std::uint8_t known_by[kMaxCandidates];  // the longest context of the chain that knows it
    Context chain[kContexts];               // longest first

    int most_likely() const;
    void remove(int index);
  };
  struct Pending {  // a node not yet taken into the tree
    Token token;  // kNoToken: what else may follow `from`, besides its only follower; `raw` bounds their sum
    std::int32_t parent;
    float raw;
    Context from;  // the longest context that knows the token
  };
  // A pending node in the heap: its confidence's bits above the complement of its index in pending_, so that of equals
  // the first found goes first. Bits of positive floats order like the floats, and a word moves faster than a struct.
  using Rank = std::uint64_t;

  Context first(State state, std::uint32_t matched, std::uint32_t own) const;
  // Inline, all three: as calls they spend more time passing contexts than reading the automaton.
  Context shorter(const Context& context) const {
    const State link = text_->link(context.state);
    return {link, text_->length(link), context.own};
  }
  // The context itself if it has followers, else its longest suffix that has; none if that is shorter than match_min. A
  // context without followers is the end of a response, or of several at the same text.
  Context going_on(Context context) const {
    while (context.exists() && text_->degree(context.state) == 0) context = shorter(context);
    return context.length >= options_.match_min ? context : Context();
  }
  // The learned probability that the context knows what comes next.
  float hit(const Context& context, std::uint32_t degree) const {
    return hits_.probability(context.length, text_->count(context.state) - context.own, degree);
  }
  const std::vector<DraftNode>& run(const Context& start, int budget);
  void linear(Context context);
  void tree(const Context& start);
  void expand(const Context& context, float raw, std::int32_t parent);
  void expand_rest(Pending rest);
  void push_best(Candidates& candidates, int most, float raw, std::int32_t parent);
  void push(float raw, Token token, std::int32_t parent, const Context& from);
  void take(Token token, std::int32_t parent, float raw);
  void blend(const Context& longest, Candidates* out) const;
  void add_context(int index, Candidates* out) const;

  const HitTable& hits_;
  const Calibration& calibration_;
  const SuffixAutomaton* text_ = nullptr;
  DraftOptions options_;
  float min_raw_ = 0;
  int budget_ = 0;
  std::vector<DraftNode> nodes_;
  std::vector<Pending> pending_;
  std::vector<Rank> heap_;
};

}  // namespace seer::drafting
