// SPDX-License-Identifier: Apache-2.0
// A call that does not get the lock in its middle, because another process was stopped inside it: what the call had
// begun to copy is given up later, so that its slots serve again.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <time.h>

#include <functional>

#include "kvpool/tests/fixture.h"

namespace {

int num_given = -1;  // locks that are given before one is not; below zero all are

}  // namespace

// In front of the library's.
extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until) noexcept {
  using Lock = int (*)(pthread_mutex_t*, clockid_t, const timespec*);
  static const Lock lock = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_clocklock"));
  if (num_given >= 0 && num_given-- == 0) return ETIMEDOUT;
  return lock(mutex, clock, until);
}

using namespace seer::kvpool;

namespace {

constexpr uint32_t kDramSlots = 4, kSsdSlots = 4;

std::vector<Name> numbered(uint32_t first, uint32_t last) {
  std::vector<Name> names;
  for (uint32_t number = first; number < last; ++number) names.push_back({1, number});
  return names;
}

// Play a call again and again, each time with another lock that is not given; returns how often one was not.
int without_one_lock(const std::function<void(Arena&)>& prepare, const std::function<void(Arena&)>& call) {
  for (int lock = 0;; ++lock) {
    Folder folder;
    Arena::create(folder.arena(), folder.slab(), test_config(kDramSlots, kSsdSlots));
    Arena arena(folder.arena(), folder.slab(), kDeadline_s, false);
    prepare(arena);
    num_given = lock;
    const bool failed = refuses([&] { call(arena); }, "lock");
    num_given = -1;
    if (!failed) return lock;
    arena.reap();  // any call that gets the lock
    CHECK(is_sound(arena));
    CHECK(arena.file().header()->num_claims == 0);
    // Every slot of both tiers serves again.
    arena.drop_weights_version(1);
    std::vector<Name> names;
    for (uint32_t number = 0; number < kDramSlots + kSsdSlots; ++number) names.push_back({2, number});
    const RequestId request{1, 1};
    CHECK(put(arena, names, {request}) == std::vector<bool>(names.size(), true));
    CHECK(get(arena, names, false) == std::vector<bool>(names.size(), true));
  }
}

}  // namespace

int main() {
  const auto nothing = [](Arena&) {};
  CHECK(without_one_lock(nothing, [](Arena& arena) { put(arena, numbered(0, 3), {}); }) == 2);
  CHECK(without_one_lock(nothing, [](Arena& arena) { put(arena, numbered(0, 6), {}); }) > 4);
  const auto filled = [](Arena& arena) { put(arena, numbered(0, kDramSlots), {}); };
  CHECK(without_one_lock(filled, [](Arena& arena) { arena.spill(2, false); }) == 2);
  const auto spilled = [&](Arena& arena) { filled(arena), arena.spill(3, false); };
  CHECK(without_one_lock(spilled, [](Arena& arena) { arena.promote(key_of({1, 0}).data(), 1); }) == 2);
  CHECK(without_one_lock(spilled, [](Arena& arena) { get(arena, numbered(0, 1), true); }) == 3);
  return seer::testing::passed("lost lock");
}
