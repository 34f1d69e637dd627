// SPDX-License-Identifier: Apache-2.0
// Outgoing edges of branch states: token -> target state, with the counts' top-8 for wide states.
//
// Most branches have one follower (half of them in a group of 10,000 tokens, six in seven at a million), a few (the
// root above all) have thousands. So a single edge lives in the branch itself, where following it touches no other
// cache line; more are contiguous arrays in size classes 2, 4, 8, 16, 32, searched linearly, and open-addressed tables
// above that. An array that is outgrown goes to the free list of its class.
//
//   kInline      no edge or one, held in the list itself; without one its token is kNoToken
//   class 1..5   array of 2^class edges, the first `degree` of them in use, in order of discovery
//   class 7..    hash table of 2^class slots, at most 70% full; an empty slot has token kNoToken
//
// From class 5 on (more than 16 followers) the array is preceded by a header of kTop entries {token, count}: the
// followers with the largest counts. Scanning all followers would make drafts slow and scanning some of them costs up
// to 5% of the accepted length. Counts only grow, so testing the one follower that just grew keeps the header exact.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "growing_array.h"

namespace seer::drafting {

constexpr std::int32_t kNoToken = INT32_MIN;

struct Edge {
  std::int32_t token;
  std::int32_t target;  // a state; in a header entry instead: the follower's count
};

// Which of these four edges have the token: bit i for edge i. Without a branch each, because where an edge stands is a
// coin toss to the branch predictor.
inline unsigned match_four(const Edge* edges, std::int32_t token) {
#if defined(__SSE2__)
  const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(edges));
  const __m128 high = _mm_loadu_ps(reinterpret_cast<const float*>(edges + 2));
  const __m128i tokens = _mm_castps_si128(_mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0)));
  return static_cast<unsigned>(_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(tokens, _mm_set1_epi32(token)))));
#else
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<unsigned>(edges[i].token == token) << i;
  return found;
#endif
}

// Index of the edge with this token; `size` or more if it is not among the first `size`. Reads three edges further.
inline int position_of(const Edge* edges, int size, std::int32_t token) {
  int at = 0;
  do {
    const unsigned found = match_four(edges + at, token);
    if (found != 0) return at + __builtin_ctz(found);
    at += 4;
  } while (at < size);
  return at;
}

// Where the edges of one branch are. Held inside the branch, written only by EdgeStore.
struct EdgeList {
  static constexpr std::uint32_t kInline = 0;

  std::uint32_t degree : 24;     // edges in use
  std::uint32_t size_class : 8;  // see above
  union {
    Edge only;             // kInline
    std::uint32_t offset;  // else: index of the first edge (after the header, if there is one)
  };

  EdgeList() : degree(0), size_class(kInline), only{kNoToken, 0} {}
  // Makes this the list of one edge, or of none if the token is kNoToken.
  void set_only(std::int32_t token, std::int32_t target) {
    degree = token == kNoToken ? 0 : 1;
    size_class = kInline;
    only.token = token;
    only.target = target;
  }
  bool is_inline() const { return size_class == kInline; }
  bool wide() const { return size_class >= 5; }
};

class EdgeStore {
 public:
  static constexpr int kTop = 8;

  // The edge with this token, or null. Valid until the next insert or copy, and while the list stays where it is.
  Edge* find(EdgeList& list, std::int32_t token) {
    if (list.is_inline()) return list.only.token == token ? &list.only : nullptr;
    if (list.size_class > kLastArrayClass) return find_in_table(list, token);
    Edge* edges = &edges_[list.offset];
    const int degree = static_cast<int>(list.degree);
    const int at = position_of(edges, degree, token);
    return at < degree ? edges + at : nullptr;
  }
  const Edge* find(const EdgeList& list, std::int32_t token) const {
    return const_cast<EdgeStore*>(this)->find(const_cast<EdgeList&>(list), token);
  }

  // Adds an edge that is not there yet. `count_of(target)` is asked only when the list becomes wide.
  template <class CountOf>
  void insert(EdgeList& list, Edge edge, CountOf&& count_of);

  // Makes `twin` a separate copy of the list, as tight as its class allows.
  void copy(const EdgeList& list, EdgeList* twin);

  // Wide lists only: the follower `token` now has this count.
  void raise_top(const EdgeList& list, std::int32_t token, std::uint32_t count);

  // Wide lists only: the header, kTop entries; unused ones have count 0.
  const Edge* top(const EdgeList& list) const { return &edges_[list.offset - kTop]; }

  // Narrow lists only: the edges, `degree` of them.
  const Edge* narrow(const EdgeList& list) const { return list.is_inline() ? &list.only : &edges_[list.offset]; }

  // Calls visit(edge) for every edge of the list.
  template <class Visit>
  void each(const EdgeList& list, Visit&& visit) const {
    if (list.is_inline()) {
      if (list.degree == 1) visit(list.only);
      return;
    }
    const bool table = list.size_class > kLastArrayClass;
    const std::uint32_t slots = table ? 1u << list.size_class : list.degree;
    for (std::uint32_t i = 0; i < slots; ++i) {
      const Edge& edge = edges_[list.offset + i];
      if (edge.token != kNoToken) visit(edge);
    }
  }

  std::size_t bytes() const { return edges_.bytes(); }

 private:
  static constexpr std::uint32_t kFirstArrayClass = 1;
  static constexpr std::uint32_t kLastArrayClass = 5;   // 32 edges: where a linear search stops paying
  static constexpr std::uint32_t kFirstTableClass = 7;  // 128 slots hold the 33rd edge well below the fill limit
  static constexpr std::uint32_t kFirstWideClass = 5;
  static constexpr std::uint32_t kClasses = 32;

  Edge* find_in_table(const EdgeList& list, std::int32_t token);
  std::uint32_t allocate(std::uint32_t size_class);
  void grow(EdgeList& list);
  void fill_table(std::uint32_t offset, std::uint32_t size_class, const EdgeList& from);
  void put(std::uint32_t offset, std::uint32_t size_class, Edge edge);
  bool full(const EdgeList& list) const;
  static std::uint32_t slot(std::int32_t token, std::uint32_t size_class) {
    return (static_cast<std::uint32_t>(token) * 2654435769u) >> (32 - size_class);
  }

  GrowingArray<Edge> edges_;
  std::vector<std::uint32_t> free_[kClasses];  // offsets of arrays given back, by class
};

template <class CountOf>
void EdgeStore::insert(EdgeList& list, Edge edge, CountOf&& count_of) {
  if (list.degree == 0) {
    list.only = edge;
    list.degree = 1;
    return;
  }
  const bool was_wide = list.wide();
  if (full(list)) grow(list);
  if (list.size_class > kLastArrayClass) {
    put(list.offset, list.size_class, edge);
  } else {
    edges_[list.offset + list.degree] = edge;
  }
  list.degree = list.degree + 1;
  if (was_wide || !list.wide()) return;
  for (int i = 0; i < kTop; ++i) edges_[list.offset - kTop + i] = Edge{kNoToken, 0};
  each(list, [&](const Edge& e) { raise_top(list, e.token, count_of(e.target)); });
}

}  // namespace seer::drafting
