// SPDX-License-Identifier: Apache-2.0
// What lies in the shared file, and which of it is the truth.
//
//   header | entries | pins | hash cells | slot owners | free stacks | pin buckets | block data (page aligned)
//
// Truth (survives a process killed between any two instructions, because it changes by single 8-byte stores, or is
// covered by a check that fails while it is half written):
//   entries: key, checksum, generation, length, `word` (state and slots), `claim` (who is copying where)
//   pins:    request, entry, generation
//   header:  configuration, dropped weights versions
// Derived (rebuilt from the truth whenever a process dies inside the lock or damage is seen):
//   hash cells, lists, slot owners, free stacks, pin chains, totals
// Advisory (wrong values change order or statistics, never content): ticks, counters, latency buckets, client pids.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "checksum.h"

namespace seer::kvpool {

constexpr uint32_t kNone = 0xFFFFFFFFu;      // no entry, pin or slot
constexpr uint32_t kNoSlot = 0xFFFFFFu;      // no slot, inside a packed word (24 bits)
constexpr uint32_t kMaxSlots = kNoSlot - 1;  // per tier
constexpr uint32_t kKeyBytes = 32;
constexpr uint32_t kMaxClients = 128;
constexpr uint32_t kMaxDropped = 256;
constexpr uint32_t kPage = 4096;
constexpr char kMagic[8] = {'s', 'e', 'e', 'r', 'p', 'o', 'l', '2'};

enum class State : uint32_t {
  kFree = 0,
  kReserved = 1,  // a writer fills its DRAM slot; in no list and not in the hash
  kHeld = 2,      // acknowledged
  kDoomed = 3,    // dropped while somebody copies from or to it; freed when that copy ends
};

// Where an entry's bytes are: state (4 bits), DRAM slot (24), SSD slot (24), check (12); stored by one instruction.
struct Word {
  State state = State::kFree;
  uint32_t dram = kNoSlot;
  uint32_t ssd = kNoSlot;
};

enum class Tier : uint32_t { kNoTier = 0, kDram = 1, kSsd = 2 };

// A copy in progress: client + 1 (16 bits), target tier (4), target slot (24), check (12). Zero: no copy. A reservation
// has no target: its slot is the entry's own.
struct Claim {
  uint32_t client = kNone;
  Tier tier = Tier::kNoTier;
  uint32_t slot = kNoSlot;
};

inline uint64_t check12(uint64_t bits52, uint32_t seed) {
  const uint32_t crc = crc32c_word(seed, bits52);
  return (crc ^ crc >> 12 ^ crc >> 24) & 0xFFF;
}

inline uint64_t pack(const Word& word) {
  const uint64_t bits = uint64_t(word.state) << 48 | uint64_t(word.dram) << 24 | word.ssd;
  return bits << 12 | check12(bits, 0xA5);
}

inline bool unpack(uint64_t packed, Word* word) {
  const uint64_t bits = packed >> 12;
  if ((packed & 0xFFF) != check12(bits, 0xA5)) return false;
  word->state = State(bits >> 48);
  word->dram = uint32_t(bits >> 24) & 0xFFFFFF;
  word->ssd = uint32_t(bits) & 0xFFFFFF;
  return word->state <= State::kDoomed;
}

inline uint64_t pack(const Claim& claim) {
  const uint64_t bits = uint64_t(claim.client + 1) << 28 | uint64_t(claim.tier) << 24 | claim.slot;
  return bits << 12 | check12(bits, 0x5A);
}

inline bool unpack(uint64_t packed, Claim* claim) {
  if (packed == 0) return *claim = Claim{}, true;
  const uint64_t bits = packed >> 12;
  if ((packed & 0xFFF) != check12(bits, 0x5A)) return false;
  claim->client = uint32_t(bits >> 28) - 1;
  claim->tier = Tier(uint32_t(bits >> 24) & 0xF);
  claim->slot = uint32_t(bits) & 0xFFFFFF;
  return claim->client < kMaxClients;
}

struct Entry {
  uint8_t key[kKeyBytes];  // first 8 bytes: the weights version
  uint64_t sum;            // checksum of the block
  uint64_t generation;     // never used twice: tells a block from a later one in the same entry
  uint32_t length;         // bytes of the block
  uint32_t check;          // CRC32C of the fields above; written before `word` says kHeld
  std::atomic<uint64_t> word;
  std::atomic<uint64_t> claim;
  uint64_t tick;      // advisory: last use
  uint32_t list;      // derived from here on: which list, or kNone
  uint32_t previous;  // towards more recent use
  uint32_t next;      // towards less recent use
  uint32_t pin_head;  // first pin of this entry; kNone: not pinned
  uint64_t unused_[4];

  uint32_t computed_check() const {
    uint32_t crc = 0xC0FFEEu;
    uint64_t words[4];
    std::memcpy(words, key, kKeyBytes);
    for (uint64_t value : words) crc = crc32c_word(crc, value);
    return crc32c_word(crc32c_word(crc32c_word(crc, sum), generation), length);
  }
  uint64_t weights_version() const {
    uint64_t value;
    std::memcpy(&value, key, 8);
    return value;
  }
};
static_assert(sizeof(Entry) == 128, "two cache lines");

struct RequestId {  // a 128-bit digest of the request's name
  uint64_t low = 0, high = 0;
  bool operator==(const RequestId& other) const { return low == other.low && high == other.high; }
};

struct Pin {
  RequestId request;
  uint64_t generation;                      // of the entry; a pin of an earlier block in that entry is void
  uint32_t entry;                           // kNone: free
  uint32_t check;                           // CRC32C of the fields above
  uint32_t request_previous, request_next;  // derived: chain of the request's bucket
  uint32_t entry_previous, entry_next;      // derived: chain of the entry

  uint32_t computed_check() const {
    uint32_t crc = crc32c_word(0xBADCAFEu, request.low);
    return crc32c_word(crc32c_word(crc32c_word(crc, request.high), generation), entry);
  }
};
static_assert(sizeof(Pin) == 48);

// Entries by tier and pinned or not, each from most to least recent use.
enum List : uint32_t { kDramFree, kDramPinned, kBothFree, kBothPinned, kSsdFree, kSsdPinned, kNumLists };

struct Dropped {
  uint64_t weights_version;
  uint64_t check;  // crc32c_word(1, weights version) + 1; 0: unused
};

struct Client {  // advisory; a client is alive while it holds its byte of the file (shared_file.h)
  uint32_t pid;
  uint32_t attached;
};

enum Counter : uint32_t {
  kPut,
  kDuplicate,
  kRefused,
  kHitDram,
  kHitSsd,
  kMiss,
  kCorrupt,
  kSpilled,
  kPromoted,
  kPrefetched,
  kEvicted,
  kFreed,
  kFailed,
  kRepaired,
  kReaped,
  kWrongSize,
  kBytesPut,
  kBytesGot,
  kNumCounters
};

enum Call : uint32_t { kCallPut, kCallGet, kCallLookup, kNumCalls };
constexpr uint32_t kLatencyBuckets = 40;  // bucket i: up to 2^i ns

struct Config {
  char magic[8];
  uint64_t file_bytes;
  uint64_t slot_bytes;    // largest block
  uint64_t stride_bytes;  // slot_bytes rounded up to pages
  uint32_t dram_slots, ssd_slots;
  uint32_t num_entries, num_pins;
  uint32_t num_cells, num_buckets;  // powers of two
  uint8_t identity[16];             // also at the start of the slab file: they belong together
  char boot[40];                    // kernel boot id: a lock taken before a reboot means nothing
  char run[88];                     // whose arena this is
};

struct Header {
  Config config;
  uint64_t config_check;

  alignas(64) pthread_mutex_t mutex;
  alignas(64) std::atomic<uint32_t> keeper_bell;  // rung when free DRAM runs low
  std::atomic<uint32_t> room_bell;                // rung when a DRAM slot became free
  uint64_t last_generation, last_tick;

  Dropped dropped[kMaxDropped];
  uint32_t next_dropped;

  // derived
  uint32_t num_free_entries, num_free_dram, num_free_ssd, num_free_pins;
  uint32_t num_held, num_claims, num_pinned;
  uint64_t dram_bytes, ssd_bytes;
  uint32_t head[kNumLists], tail[kNumLists];

  Client clients[kMaxClients];
  std::atomic<uint64_t> counters[kNumCounters];
  std::atomic<uint64_t> latency[kNumCalls][kLatencyBuckets];
};

// The configuration of an arena with these sizes; its identity, boot and run are left empty.
inline Config sized_config(uint64_t slot_bytes, uint32_t dram_slots, uint32_t ssd_slots, uint32_t num_pins) {
  auto power_of_two = [](uint64_t least) {
    uint64_t value = 16;
    while (value < least) value *= 2;
    return uint32_t(value);
  };
  Config config{};
  config.slot_bytes = slot_bytes;
  config.stride_bytes = (slot_bytes + kPage - 1) & ~uint64_t{kPage - 1};
  config.dram_slots = dram_slots;
  config.ssd_slots = ssd_slots;
  config.num_entries = dram_slots + ssd_slots;
  config.num_pins = num_pins;
  config.num_cells = power_of_two(uint64_t{config.num_entries} * 2);
  config.num_buckets = power_of_two(num_pins < 1u << 20 ? num_pins : 1u << 20);
  return config;
}

// Byte offsets of the sections for a configuration.
struct Sections {
  uint64_t entries, pins, cells, dram_owner, ssd_owner, free_entries, free_dram, free_ssd, free_pins, buckets, data,
      end;

  explicit Sections(const Config& config) {
    uint64_t at = (sizeof(Header) + 127) & ~uint64_t{127};
    auto take = [&at](uint64_t bytes) {
      const uint64_t start = at;
      at = (at + bytes + 63) & ~uint64_t{63};
      return start;
    };
    entries = take(uint64_t{config.num_entries} * sizeof(Entry));
    pins = take(uint64_t{config.num_pins} * sizeof(Pin));
    cells = take(uint64_t{config.num_cells} * 8);
    dram_owner = take(uint64_t{config.dram_slots} * 4);
    ssd_owner = take(uint64_t{config.ssd_slots} * 4);
    free_entries = take(uint64_t{config.num_entries} * 4);
    free_dram = take(uint64_t{config.dram_slots} * 4);
    free_ssd = take(uint64_t{config.ssd_slots} * 4);
    free_pins = take(uint64_t{config.num_pins} * 4);
    buckets = take(uint64_t{config.num_buckets} * 4);
    data = (at + kPage - 1) & ~uint64_t{kPage - 1};
    end = data + uint64_t{config.dram_slots} * config.stride_bytes;
  }
};

}  // namespace seer::kvpool
