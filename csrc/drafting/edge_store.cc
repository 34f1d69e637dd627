// SPDX-License-Identifier: Apache-2.0
#include "edge_store.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace seer::drafting {

Edge* EdgeStore::find_in_table(const EdgeList& list, std::int32_t token) {
  Edge* edges = &edges_[list.offset];
  const std::uint32_t mask = (1u << list.size_class) - 1;
  for (std::uint32_t i = slot(token, list.size_class); edges[i].token != kNoToken; i = (i + 1) & mask) {
    if (edges[i].token == token) return edges + i;
  }
  return nullptr;
}

bool EdgeStore::full(const EdgeList& list) const {
  if (list.is_inline()) return true;
  const std::uint32_t slots = 1u << list.size_class;
  return list.size_class <= kLastArrayClass ? list.degree == slots : list.degree * 10 >= slots * 7;
}

// Moves a full list into the next class. The header moves along; a list that only now becomes wide gets its header
// from `insert`.
void EdgeStore::grow(EdgeList& list) {
  if (list.is_inline()) {
    const std::uint32_t offset = allocate(kFirstArrayClass);
    edges_[offset] = list.only;
    list.offset = offset;
    list.size_class = kFirstArrayClass;
    return;
  }
  const std::uint32_t old_class = list.size_class;
  const std::uint32_t old_offset = list.offset;
  const std::uint32_t new_class = old_class == kLastArrayClass ? kFirstTableClass : old_class + 1;
  const std::uint32_t new_offset = allocate(new_class);
  if (new_class <= kLastArrayClass) {
    for (std::uint32_t i = 0; i < list.degree; ++i) edges_[new_offset + i] = edges_[old_offset + i];
  } else {
    fill_table(new_offset, new_class, list);
  }
  if (list.wide()) std::memcpy(&edges_[new_offset - kTop], &edges_[old_offset - kTop], kTop * sizeof(Edge));
  free_[old_class].push_back(old_offset);
  list.offset = new_offset;
  list.size_class = new_class;
}

void EdgeStore::fill_table(std::uint32_t offset, std::uint32_t size_class, const EdgeList& from) {
  for (std::uint32_t i = 0; i < 1u << size_class; ++i) edges_[offset + i].token = kNoToken;
  each(from, [&](const Edge& edge) { put(offset, size_class, edge); });
}

void EdgeStore::put(std::uint32_t offset, std::uint32_t size_class, Edge edge) {
  const std::uint32_t mask = (1u << size_class) - 1;
  std::uint32_t i = slot(edge.token, size_class);
  while (edges_[offset + i].token != kNoToken) i = (i + 1) & mask;
  edges_[offset + i] = edge;
}

void EdgeStore::copy(const EdgeList& list, EdgeList* twin) {
  if (list.is_inline()) {
    twin->set_only(list.only.token, list.only.target);
    return;
  }
  std::uint32_t size_class = list.size_class;
  std::uint32_t used = 1u << size_class;
  if (size_class <= kLastArrayClass) {
    used = list.degree;
    // Never tighter than the header allows: a wide list stays wide.
    size_class = list.wide() ? kFirstWideClass : kFirstArrayClass;
    while ((1u << size_class) < used) ++size_class;
  }
  twin->offset = allocate(size_class);
  twin->size_class = size_class;
  twin->degree = list.degree;
  for (std::uint32_t i = 0; i < used; ++i) edges_[twin->offset + i] = edges_[list.offset + i];
  if (list.wide()) std::memcpy(&edges_[twin->offset - kTop], &edges_[list.offset - kTop], kTop * sizeof(Edge));
}

void EdgeStore::raise_top(const EdgeList& list, std::int32_t token, std::uint32_t count) {
  Edge* top = &edges_[list.offset - kTop];
  int lowest = 0;
  for (int i = 0; i < kTop; ++i) {
    if (top[i].token == token) {
      top[i].target = static_cast<std::int32_t>(count);
      return;
    }
    if (top[i].target < top[lowest].target) lowest = i;
  }
  if (static_cast<std::int32_t>(count) > top[lowest].target) {
    top[lowest] = Edge{token, static_cast<std::int32_t>(count)};
  }
}

std::uint32_t EdgeStore::allocate(std::uint32_t size_class) {
  if (size_class >= kClasses) throw std::length_error("draft index: a state has too many followers");
  std::vector<std::uint32_t>& free = free_[size_class];
  if (!free.empty()) {
    const std::uint32_t offset = free.back();
    free.pop_back();
    return offset;
  }
  const std::size_t header = size_class >= kFirstWideClass ? kTop : 0;
  const std::size_t needed = (std::size_t{1} << size_class) + header;
  if (edges_.size() + needed > UINT32_MAX) throw std::length_error("draft index: a group has too many edges");
  return static_cast<std::uint32_t>(edges_.take(needed) + header);
}

}  // namespace seer::drafting
