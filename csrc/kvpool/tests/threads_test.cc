// SPDX-License-Identifier: Apache-2.0
// Many threads and a keeper on one arena, for the thread sanitizer. Every block that is read has the right bytes.
#include <atomic>
#include <thread>

#include "kvpool/tests/clocklock.h"
#include "kvpool/tests/fixture.h"

using namespace seer::kvpool;

namespace {

constexpr uint32_t kNumNames = 40;

void threads_share_an_arena(uint32_t dram_slots, uint32_t ssd_slots) {
  Folder folder;
  Arena::create(folder.arena(), folder.slab(), test_config(dram_slots, ssd_slots));
  Arena arena(folder.arena(), folder.slab(), kDeadline_s, false);
  std::atomic<uint64_t> num_got{0};
  const auto work = [&](unsigned thread) {
    std::mt19937 rng(unsigned(seer::testing::seed()) * 16 + thread);
    for (int call = 0; call < 250; ++call) {
      std::vector<Name> names(1 + rng() % 5);
      for (Name& name : names) name.number = rng() % kNumNames, name.weights_version = 1 + name.number % 2;
      const RequestId request{1 + rng() % 3, 0};
      switch (rng() % 10) {
        case 0:
          arena.unpin(request, rng() % 2);
          break;
        case 1:
          arena.pin(request, keys_of(names).data(), names.size());
          break;
        case 2:
          arena.spill(rng() % 4, rng() % 2);
          break;
        case 3:
          arena.promote(keys_of(names).data(), names.size());
          break;
        case 4:
          if (rng() % 10 == 0) arena.rebuild();
          if (rng() % 80 == 0) arena.drop_weights_version(2);
          arena.lookup(keys_of(names).data(), names.size());
          break;
        case 5:
        case 6:
        case 7:
          put(arena, names, rng() % 2 ? std::vector<RequestId>{request} : std::vector<RequestId>{});
          break;
        default:
          for (const bool got : get(arena, names, rng() % 2)) num_got += got;
      }
    }
  };
  std::atomic<bool> done{false};
  std::thread keeper([&] {
    while (!done) CHECK(arena.keep(0.01));
  });
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) threads.emplace_back(work, thread);
  for (std::thread& thread : threads) thread.join();
  done = true;
  arena.stop_keeping();
  keeper.join();
  CHECK(num_got > 0);
  CHECK(is_sound(arena));
  CHECK(arena.file().header()->num_claims == 0);
  CHECK(counter(arena, kCorrupt) == 0 && counter(arena, kRepaired) == 0 && counter(arena, kFailed) == 0);
}

}  // namespace

int main() {
  threads_share_an_arena(24, 30);
  threads_share_an_arena(6, 8);
  threads_share_an_arena(8, 0);
  return seer::testing::passed("threads");
}
