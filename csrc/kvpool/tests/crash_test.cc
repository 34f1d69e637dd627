// SPDX-License-Identifier: Apache-2.0
// Processes killed at every crash point while others are attached: what was acknowledged is there, what was dropped is
// not, no slot is lost, and the survivors go on.
#include <sys/mman.h>
#include <sys/wait.h>

#include <algorithm>
#include <memory>

#include "kvpool/crash_point.h"
#include "kvpool/tests/fixture.h"

using namespace seer::kvpool;

namespace {

constexpr uint32_t kNumNames = 24;
constexpr uint32_t kDramSlots = 6, kSsdSlots = 30;  // all names fit, so nothing acknowledged may be evicted

Name name_of(uint32_t number) { return {1 + number % 2, number}; }
RequestId request_of(uint32_t name) { return {name % 3 + 1, name % 3}; }

// What the child has been promised, in memory that outlives it.
struct Promised {
  bool held[kNumNames];
  bool dropped[3];
};

// Random calls until the crash point kills this process, or they are done.
void work(const Folder& folder, std::mt19937& rng, Promised* promised) {
  Arena& arena = *new Arena(folder.arena(), folder.slab(), kDeadline_s, false);
  for (int call = 0; call < 80; ++call) {
    const uint32_t number = rng() % kNumNames;
    const Name name = name_of(number);
    switch (rng() % 8) {
      case 0:
      case 1:
      case 2: {
        const bool held = put(arena, {name}, {request_of(number)})[0];
        if (held) promised->held[number] = true;
        else CHECK(promised->dropped[name.weights_version]);
        break;
      }
      case 3:
        get(arena, {name}, true);
        break;
      case 4:
        arena.spill(1 + rng() % 4, false);
        break;
      case 5:
        arena.promote(key_of(name).data(), 1);
        break;
      case 6: {
        if (rng() % 4) break;
        // From the call on the blocks may be gone.
        const RequestId request = request_of(number);
        for (uint32_t other = 0; other < kNumNames; ++other)
          if (request_of(other) == request) promised->held[other] = false;
        arena.unpin(request, true);
        break;
      }
      default:
        if (rng() % 8 == 0) arena.rebuild();
        if (rng() % 16) break;
        for (uint32_t other = 0; other < kNumNames; ++other)
          if (name_of(other).weights_version == name.weights_version) promised->held[other] = false;
        arena.drop_weights_version(name.weights_version);
        promised->dropped[name.weights_version] = true;
    }
  }
}

// Whether the child got as far as the crash point.
bool killed_at(CrashPoint point, std::mt19937& rng) {
  Folder folder;
  Arena::create(folder.arena(), folder.slab(), test_config(kDramSlots, kSsdSlots));
  auto* promised = static_cast<Promised*>(
      ::mmap(nullptr, sizeof(Promised), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  CHECK(promised != MAP_FAILED);
  auto survivor = std::make_unique<Arena>(folder.arena(), folder.slab(), kDeadline_s, false);
  const uint32_t times_first = rng() % 4, seed_of_work = uint32_t(rng());

  const pid_t child = ::fork();
  if (child == 0) {
    std::mt19937 its(seed_of_work);
    crash_after = times_first;
    crash_point = uint32_t(point);
    work(folder, its, promised);
    ::_exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  CHECK(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0));

  // Half of the time the survivor goes on, else a client that attaches later does.
  if (rng() % 2)
    survivor = nullptr, survivor = std::make_unique<Arena>(folder.arena(), folder.slab(), kDeadline_s, false);
  survivor->reap();
  CHECK(is_sound(*survivor));
  CHECK(survivor->file().header()->num_claims == 0);
  for (uint32_t number = 0; number < kNumNames; ++number) {
    const bool held = get(*survivor, {name_of(number)}, false)[0];
    CHECK(held || !promised->held[number]);
    CHECK(!held || !promised->dropped[name_of(number).weights_version]);
  }
  CHECK(counter(*survivor, kCorrupt) == 0);

  // Every slot can be used again, and a drop that was cut short can be done again.
  for (const uint64_t weights_version : {1, 2}) survivor->drop_weights_version(weights_version);
  const Header& header = *survivor->file().header();
  CHECK(header.num_held == 0 && header.num_free_pins == survivor->file().config().num_pins);
  CHECK(header.num_free_dram == kDramSlots && header.num_free_ssd == kSsdSlots);
  for (uint32_t number = 0; number < kDramSlots; ++number) CHECK(put(*survivor, {Name{3, number}}, {})[0]);
  CHECK(is_sound(*survivor));
  ::munmap(promised, sizeof(Promised));
  return killed;
}

}  // namespace

int main() {
  std::mt19937 rng(static_cast<unsigned>(seer::testing::seed()));
  for (uint32_t point = 1; point < uint32_t(CrashPoint::kCount); ++point) {
    int num_killed = 0;
    for (int round = 0; round < 50 && num_killed < 5; ++round) num_killed += killed_at(CrashPoint(point), rng);
    if (num_killed < 5) std::fprintf(stderr, "crash point %s\n", kCrashPointNames[point]);
    CHECK(num_killed == 5);
  }
  return seer::testing::passed("crash");
}
