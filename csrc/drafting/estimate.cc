// SPDX-License-Identifier: Apache-2.0
#include "estimate.h"

#include <algorithm>
#include <cstring>

namespace seer::drafting {

namespace {
std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace

void Estimate::find_contexts(const ContextReader& reader, const Context& longest) {
  depth_ = 0;
  // What follows a context also follows its suffixes: they have followers, too.
  for (Context context = longest; context.length >= reader.match_min && depth_ < kContexts;
       context = reader.shorter(context)) {
    levels_[depth_++].context = context;
    reader.text->prefetch_edges(context.state);
  }
}

void Estimate::read_followers(const ContextReader& reader) {
  for (int i = 0; i < depth_; ++i) {
    Level& level = levels_[i];
    const Context& context = level.context;
    reader.text->followers(context.state, &level.followers);
    level.hit_rate =
        reader.hits->probability(context.length, level.followers.seen - context.own, level.followers.degree);
    level.overruled = 0;
  }
}

void Estimate::weigh() {
  make_shortest(levels_[depth_ - 1]);
  for (int index = depth_ - 2; index >= 0; --index) make_longer(index);
}

void Estimate::make_shortest(Level& level) {
  size_ = level.followers.size;
  const float per_count = level.hit_rate / static_cast<float>(level.followers.total);
  for (int f = 0; f < size_; ++f) {
    level.probability[f] = per_count * static_cast<float>(level.followers.count[f]);
    level.place[f] = static_cast<std::uint8_t>(f);
  }
}

// Turns the estimate Q of the shorter contexts into the estimate P with this one.
void Estimate::make_longer(int index) {
  Level& level = levels_[index];
  Level& shorter = levels_[index + 1];
  const Edge* edges = level.followers.edges;
  const Edge* shorter_edges = shorter.followers.edges;
  const int known = level.followers.size, shorter_known = shorter.followers.size;
  std::uint32_t overruled = 0;
  float inside = 0;  // Q(F)
  for (int f = 0; f < known; ++f) {
    const int at = position_of(shorter_edges, shorter_known, edges[f].token);
    if (at < shorter_known) {
      overruled |= 1u << at;
      level.place[f] = shorter.place[at];
      level.probability[f] = shorter.probability[at];
    } else {
      level.probability[f] = unlisted(index, f);
    }
    inside += level.probability[f];
  }
  shorter.overruled |= overruled;
  const float weight = inside > 0 ? kShorterWeight * static_cast<float>(known) : 0;
  const float per_count = level.hit_rate / (static_cast<float>(level.followers.total) + weight);
  const float per_shorter = inside > 0 ? per_count * weight / inside : 0;
  level.outside = (1 - level.hit_rate) / std::max(1 - inside, 1e-6f);
  for (int f = 0; f < known; ++f) {
    level.probability[f] =
        per_count * static_cast<float>(level.followers.count[f]) + per_shorter * level.probability[f];
  }
}

// Q of a follower that the next shorter context, being wide, does not list; 0 if none does.
float Estimate::unlisted(int index, int follower) {
  Level& level = levels_[index];
  for (int i = index + 2; i < depth_; ++i) {
    Level& knower = levels_[i];
    const int at = position_of(knower.followers.edges, knower.followers.size, level.followers.edges[follower].token);
    if (at >= knower.followers.size) continue;
    knower.overruled |= 1u << at;
    level.place[follower] = knower.place[at];
    float probability = knower.probability[at];
    while (--i > index) probability *= levels_[i].outside;
    return probability;
  }
  level.place[follower] = static_cast<std::uint8_t>(size_++);
  return 0;
}

// Ranks are compared as one word: the bits of positive floats order like the floats; below them comes the place, as of
// equals the last is to win; below that whose follower it is.
Estimate::Best Estimate::best() const {
  std::uint64_t best = 0;
  for (int index = 0; index < depth_; ++index) {
    const Level& level = levels_[index];
    std::uint64_t here = 0;
    for (int f = 0; f < level.followers.size; ++f) {
      const std::uint64_t rank =
          std::uint64_t{bits_of(level.probability[f])} << 32 | static_cast<std::uint32_t>(level.place[f] << 16 | f);
      here = std::max(here, (level.overruled >> f & 1) != 0 ? 0 : rank);
    }
    float probability = float_of(static_cast<std::uint32_t>(here >> 32));
    for (int i = index; --i >= 0;) probability *= levels_[i].outside;
    const std::uint32_t whose = static_cast<std::uint32_t>(here) | static_cast<std::uint32_t>(index) << 8;
    best = std::max(best, std::uint64_t{bits_of(probability)} << 32 | whose);
  }
  const Level& level = levels_[best >> 8 & 0xff];
  const Edge& edge = level.followers.edges[best & 0xff];
  const float probability = float_of(static_cast<std::uint32_t>(best >> 32));
  return {edge.token, probability, &level.context, level.followers.wide ? kNone : edge.target};
}

void Estimate::list(Candidates* out) const {
  out->size = size_;
  for (int index = 0; index < depth_; ++index) {
    const Level& level = levels_[index];
    for (int f = 0; f < level.followers.size; ++f) {
      if ((level.overruled >> f & 1) != 0) continue;
      float probability = level.probability[f];
      for (int i = index; --i >= 0;) probability *= levels_[i].outside;
      const int place = level.place[f];
      out->token[place] = level.followers.edges[f].token;
      out->probability[place] = probability;
      out->known_by[place] = static_cast<std::uint8_t>(index);
    }
  }
}

int Candidates::most_likely() const {
  int best = 0;
  for (int i = 1; i < size; ++i) {
    if (probability[i] >= probability[best]) best = i;
  }
  return best;
}

void Candidates::remove(int index) {
  --size;
  token[index] = token[size];
  probability[index] = probability[size];
  known_by[index] = known_by[size];
}

}  // namespace seer::drafting
