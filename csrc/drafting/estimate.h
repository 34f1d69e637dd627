// SPDX-License-Identifier: Apache-2.0
// What may follow a context, and how likely: back-off over the suffix-link chain.
//
// Take up to kContexts contexts that have followers, longest first. With F the followers of context i, c(t) the count
// of follower t, n their total and h the learned probability that the next token is in F given that no longer context
// knew it (PPM's escape, see HitTable), and Q the estimate of the shorter contexts,
//
//     t in F       P(t) = h * (c(t) + k * Q(t) / Q(F)) / (n + k)      k = kShorterWeight * |F|
//     otherwise    P(t) = (1 - h) * Q(t) / (1 - Q(F))
//
// The longest context that knows a token decides; shorter ones only share out what it leaves open, the more so the more
// followers compete for few counts (Witten and Bell), and what it does not know at all. Plainly mixing the contexts'
// shares counts the same evidence several times, because the occurrences of a context are among those of its suffixes.
//
// Each context keeps the estimates of its own followers only, and looks up what it needs of the shorter ones'. The list
// of everything that may follow is put together only when asked for.
#pragma once

#include <cstdint>

#include "automaton.h"
#include "hit_table.h"

namespace seer::drafting {

// A state read as the string of its last `length` tokens.
struct Context {
  State state = kRoot;
  std::uint32_t length = 0;
  std::uint32_t own = 0;  // occurrences that are the requester's own tail, which nothing follows yet: 0 or 1
  bool exists() const { return state != kRoot; }
};

// The contexts of one group, as one draft reads them. All inline: as calls they spend more time passing contexts than
// reading the automaton.
struct ContextReader {
  const SuffixAutomaton* text;
  const HitTable* hits;
  std::uint32_t match_min;  // shortest context read

  Context shorter(const Context& context) const {
    const State link = text->link(context.state);
    return {link, text->length(link), context.own};
  }
  // The context itself if it has followers, else its longest suffix that has; none if that is shorter than match_min. A
  // context without followers is the end of a response, or of several at the same text.
  Context going_on(Context context) const {
    while (context.exists() && text->degree(context.state) == 0) context = shorter(context);
    return context.length >= match_min ? context : Context();
  }
  // The learned probability that the context, which `degree` different tokens followed, knows what comes next.
  float hit(const Context& context, std::uint32_t degree) const {
    return hits->probability(context.length, text->count(context.state) - context.own, degree);
  }
};

// All that may follow, in no order that matters but among equals.
struct Candidates {
  static constexpr int kMost = 3 * SuffixAutomaton::kMaxFollowers;  // of each of Estimate::kContexts
  int size = 0;
  Token token[kMost];
  float probability[kMost];
  std::uint8_t known_by[kMost];  // the longest context that knows it, 0 being the longest of all

  // Of equals, the last: followers come in order of discovery, and the more recent one is right more often (up to 4% of
  // the accepted length where there is little text).
  int most_likely() const;
  void remove(int index);
};

class Estimate {
 public:
  static constexpr int kContexts = 3;  // 2 loses up to 0.1% of the accepted length, 4 and 6 gain nothing

  // What may follow a context that has followers, as all have that `going_on` returns. In three parts, each of which
  // waits for memory that the one before has found out about: done for several estimates in turn, they wait together.
  void make(const ContextReader& reader, const Context& longest) {
    find_contexts(reader, longest);
    read_followers(reader);
    weigh();
  }
  void find_contexts(const ContextReader& reader, const Context& longest);
  void read_followers(const ContextReader& reader);
  void weigh();

  // The likeliest token.
  struct Best {
    Token token;
    float probability;
    const Context* known_by;  // the longest context that knows it
    State leads_to;           // from there; kNone: look it up
  };
  Best best() const;

  // Everything that may follow.
  void list(Candidates* out) const;
  const Context& context(int known_by) const { return levels_[known_by].context; }

 private:
  static constexpr float kShorterWeight = 2;

  // What one context says.
  struct Level {
    Context context;
    SuffixAutomaton::Followers followers;                // F
    float hit_rate;                                      // h
    float outside;                                       // (1 - h) / (1 - Q(F)); not set for the shortest
    std::uint32_t overruled;                             // followers that a longer context knows as well, bit by bit
    float probability[SuffixAutomaton::kMaxFollowers];   // P of each follower
    std::uint8_t place[SuffixAutomaton::kMaxFollowers];  // of each follower among all candidates
  };

  void make_shortest(Level& level);
  void make_longer(int index);
  float unlisted(int index, int follower);

  int depth_ = 0;  // contexts in use, longest first
  int size_ = 0;   // different tokens among all their followers
  Level levels_[kContexts];
};

}  // namespace seer::drafting
