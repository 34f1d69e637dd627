// SPDX-License-Identifier: Apache-2.0
// A fuzzer of the arena: random damage to its file, before it is opened and while it is open. Nothing may crash, read
// beyond the file or hang, and every block that comes back has its own bytes. SEER_FUZZ_ROUNDS sets how many files are
// damaged.
//
// The lock itself is left alone: it belongs to the C library, which aborts when it finds nonsense in it.
#include <algorithm>
#include <cstddef>
#include <fstream>
#include <iterator>

#include "kvpool/tests/fixture.h"

using namespace seer::kvpool;

namespace {

constexpr uint32_t kDramSlots = 8, kSsdSlots = 6, kNumPins = 16, kNumNames = 12;
constexpr double kShortDeadline_s = 0.02;
using Bytes = std::vector<char>;

Name name_of(uint32_t number) { return {1 + number % 3, number}; }

Bytes content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

void write_to(const std::string& path, const Bytes& content) {
  std::ofstream(path, std::ios::binary).write(content.data(), std::streamsize(content.size()));
}

// An arena with blocks in both tiers, some of them pinned and a weights version dropped.
void make_arena(const Folder& folder) {
  Arena::create(folder.arena(), folder.slab(), test_config(kDramSlots, kSsdSlots, kNumPins));
  Arena arena(folder.arena(), folder.slab(), kDeadline_s, false);
  for (uint32_t number = 0; number < kNumNames; ++number) put(arena, {name_of(number)}, {{number % 3 + 1, 7}});
  arena.spill(3, false);
  arena.unpin({1, 7}, false);
  arena.drop_weights_version(3);
  CHECK(is_sound(arena));
}

// One change of the kinds that a stray write, a cut copy or a bad disk make.
void damage(uint8_t* base, uint64_t size, std::mt19937& rng) {
  const uint64_t at = rng() % size, room = size - at;
  switch (rng() % 5) {
    case 0:
      base[at] ^= uint8_t(1u << rng() % 8);
      return;
    case 1:
      for (uint64_t i = 0; i < std::min<uint64_t>(8, room); ++i) base[at + i] = uint8_t(rng());
      return;
    case 2:
      std::memset(base + at, rng() % 2 ? 0xFF : 0, std::min<uint64_t>(1 + rng() % 256, room));
      return;
    case 3: {  // one record over another
      const uint64_t from = rng() % size, length = std::min({uint64_t{128}, room, size - from});
      std::memmove(base + at, base + from, length);
      return;
    }
    default: {  // a number that is far too large, where numbers lie
      const uint32_t huge = rng() % 2 ? 0x7FFFFFFFu : 0xFFFFFF00u;
      std::memcpy(base + (at & ~uint64_t{3}), &huge, std::min<uint64_t>(4, size - (at & ~uint64_t{3})));
    }
  }
}

// The index is hit more often than the data behind it; the lock never.
void damage_some(uint8_t* base, const Sections& sections, std::mt19937& rng) {
  constexpr uint64_t kLock = offsetof(Header, mutex), kLockEnd = kLock + sizeof(pthread_mutex_t);
  uint8_t lock[sizeof(pthread_mutex_t)];
  std::memcpy(lock, base + kLock, sizeof lock);
  for (uint32_t left = 1 + rng() % 6; left > 0; --left) {
    const uint64_t start = rng() % 4 ? kLockEnd : 0, end = rng() % 8 ? sections.data : sections.end;
    damage(base + start, end - start, rng);
  }
  std::memcpy(base + kLock, lock, sizeof lock);
}

void use(Arena& arena, std::mt19937& rng) {
  for (uint32_t number = 0; number < kNumNames; ++number) get(arena, {name_of(number)}, rng() % 2);
  const std::vector<uint8_t> keys = keys_of({name_of(0), name_of(1), name_of(4)});
  arena.lookup(keys.data(), 3);
  arena.pin({9, 9}, keys.data(), 3);
  put(arena, {name_of(kNumNames + rng() % 4), name_of(rng() % kNumNames)}, {});
  arena.promote(keys.data(), 3);
  arena.spill(4, rng() % 2);
  arena.locate(keys.data());
  arena.unpin({9, 9}, rng() % 2);
  arena.drop_weights_version(1 + rng() % 3);
  arena.reap();
  arena.problems();  // must end, whatever it finds
}

// A key over another entry's, with all that its check covers: two entries have one key.
void a_doubled_key_is_dropped() {
  Folder folder;
  make_arena(folder);
  Arena arena(folder.arena(), folder.slab(), kDeadline_s, false);
  const Arena::Place one = arena.locate(key_of(name_of(3)).data()), two = arena.locate(key_of(name_of(4)).data());
  CHECK(one.held && two.held);
  uint8_t* entries = arena.file().at(arena.sections().entries);
  std::memcpy(entries + two.entry * sizeof(Entry), entries + one.entry * sizeof(Entry), offsetof(Entry, word));
  arena.rebuild();
  CHECK(is_sound(arena));
  arena.drop_weights_version(1);
  CHECK(is_sound(arena));
}

struct Tally {
  uint64_t refused = 0, used = 0, failed = 0;
};

void a_damaged_file_is_refused_or_repaired(uint64_t rounds, std::mt19937& rng, Tally* tally) {
  Folder folder;
  make_arena(folder);
  const Bytes arena_bytes = content_of(folder.arena()), slab_bytes = content_of(folder.slab());
  const Sections sections(SharedFile::probe(folder.arena()).config);
  for (uint64_t round = 0; round < rounds; ++round) {
    Bytes content = arena_bytes, slab = slab_bytes;
    damage_some(reinterpret_cast<uint8_t*>(content.data()), sections, rng);
    if (rng() % 16 == 0) content.resize(rng() % content.size());
    if (rng() % 4 == 0) damage(reinterpret_cast<uint8_t*>(slab.data()), slab.size(), rng);
    write_to(folder.arena(), content);
    write_to(folder.slab(), slab);
    try {
      Arena arena(folder.arena(), folder.slab(), kShortDeadline_s, false);
      ++tally->used;
      CHECK(is_sound(arena));  // opening it repairs the index
      use(arena, rng);
    } catch (const PoolFailure&) {
      ++tally->refused;
    }
  }
}

void damage_while_it_is_open_is_found(uint64_t rounds, std::mt19937& rng, Tally* tally) {
  for (uint64_t round = 0; round < rounds; ++round) {
    Folder folder;
    make_arena(folder);
    Arena arena(folder.arena(), folder.slab(), kShortDeadline_s, false);
    damage_some(arena.file().at(0), arena.sections(), rng);
    try {
      use(arena, rng);
      ++tally->used;
    } catch (const PoolFailure&) {
      ++tally->failed;
    }
    arena.rebuild();
    CHECK(is_sound(arena));
  }
}

}  // namespace

int main() {
  const char* given = std::getenv("SEER_FUZZ_ROUNDS");
  const uint64_t rounds = given ? std::strtoull(given, nullptr, 10) : 600;
  std::mt19937 rng(uint32_t(seer::testing::seed()));
  Tally before, open;
  a_doubled_key_is_dropped();
  a_damaged_file_is_refused_or_repaired(rounds, rng, &before);
  damage_while_it_is_open_is_found(rounds / 4, rng, &open);
  std::printf("damaged files: %llu used, %llu refused; damaged while open: %llu used, %llu failed\n",
              (unsigned long long)before.used, (unsigned long long)before.refused, (unsigned long long)open.used,
              (unsigned long long)open.failed);
  return seer::testing::passed("damage");
}
