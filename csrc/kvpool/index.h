// SPDX-License-Identifier: Apache-2.0
// The index of the pool: which block is where, what is free, what goes next. Every method needs the lock.
//
// Invariants, listed again by `problems()`
//   1. A DRAM or SSD slot belongs to at most one entry: as its place, or as the target of its claim.
//   2. The hash holds exactly the entries whose word says kHeld and whose check is right.
//   3. A held entry without a claim is in the one list that fits its slots and pins; no other entry is in any list.
//   4. A slot never becomes free while a claim of a live client points at it: its bytes may still be on their way.
//   5. Entries that are not free, and free ones, add up; so do slots and pins.
//
// How damage is met. Methods that read derived data verify what they step on (bounds, back links, cell checks, owners).
// What does not fit is `Damage`: the derived data is rebuilt from the truth, and the step is done again. Methods that
// change something change the truth first, so after a rebuild their work is already done.
#pragma once
#include <string>
#include <vector>

#include "shared_file.h"

namespace seer::kvpool {

class Index {
 public:
  explicit Index(SharedFile& file);

  // Everything derived, from the truth; frees what dead clients left. Also what a new arena starts from.
  // A client that has just got its number holds no claim yet: those under its number are a dead one's.
  enum class OwnClaims { kKeep, kVoid };
  void rebuild(OwnClaims own = OwnClaims::kKeep);
  // Frees what dead clients left, if there is anything; returns how many claims that were.
  uint32_t reap();

  Entry& entry(uint32_t e) const { return entries_[e]; }
  Word word(uint32_t e) const;
  const uint8_t* key(uint32_t e) const { return entries_[e].key; }

  uint32_t find(const uint8_t* key);  // kNone: not held. A damaged entry on the way is dropped and counted.
  void touch(uint32_t e);             // most recently used now

  uint32_t reserve(const uint8_t* key, uint32_t length);  // kNone: no DRAM slot is free
  // The reservation becomes a held block; false when a repair took it away.
  bool publish(uint32_t e, uint64_t generation, uint64_t sum);
  void give_up(uint32_t e, uint64_t generation);  // this client's reservation or copy of it, if it is there still
  void drop(uint32_t e);                          // a held entry; if somebody is copying it, it goes when the copy ends

  // Spilling. `begin_spill` frees clean copies at once and claims SSD slots for dirty ones, at most `wanted` in all.
  struct Move {
    uint32_t entry;
    uint64_t generation;
    uint32_t from, to, length;
  };
  uint32_t begin_spill(uint32_t wanted, bool may_evict, std::vector<Move>* moves);
  bool end_spill(const Move& move, bool written);
  // Promotion of an SSD-only entry; false when there is no slot to spare or nothing to promote.
  bool begin_promote(uint32_t e, bool may_take_last, Move* move);
  void end_promote(const Move& move, bool copied);
  void drop_copy(uint32_t e, Tier tier);  // one copy of a block is bad, the other may be good

  bool pin(uint32_t e, const RequestId& request);  // false: no pin record is free
  uint32_t unpin(const RequestId& request, bool drop_blocks);

  bool weights_version_dropped(const uint8_t* key) const;
  uint32_t drop_weights_version(uint64_t weights_version);

  bool claims_in_flight() const { return header_->num_claims > 0; }
  uint32_t free_dram() const { return header_->num_free_dram; }
  std::vector<std::string> problems();

  void count(Counter counter, uint64_t amount = 1) const {
    header_->counters[counter].fetch_add(amount, std::memory_order_relaxed);
  }

 private:
  struct Damage {
    const char* what;
  };
  // Run a step; on damage rebuild and run it again. `fixed` runs a step whose truth is already written.
  template <class Step>
  auto sound(Step step) -> decltype(step());
  template <class Step>
  void fixed(Step step);

  uint64_t hash(const uint8_t* key) const;
  uint64_t make_cell(uint64_t hash, uint32_t e) const;
  uint32_t cell_entry(uint64_t cell) const;  // throws Damage
  uint32_t find_cell(const uint8_t* key, uint64_t hash) const;
  void hash_insert(uint32_t e);
  void hash_erase(uint32_t e);

  uint32_t fitting_list(uint32_t e) const;
  void list_insert(uint32_t e);  // at its head
  void list_remove(uint32_t e);
  uint32_t list_end(uint32_t list, bool least_recent) const;
  void relist(uint32_t e);

  uint32_t pop(uint32_t* stack, uint32_t& count, uint32_t limit, const uint32_t* owner);
  void give_dram(uint32_t slot);
  void give_ssd(uint32_t slot);
  uint32_t take_ssd_slot(bool may_evict);
  uint32_t spill_victim();
  // Whether the entry is still as this client left it when it began to copy.
  bool mine(uint32_t e, uint64_t generation, State state, Tier tier, uint32_t target) const;
  void cancel(uint32_t e);  // a reservation or a claim of this client, given up
  void set_word(uint32_t e, const Word& word);
  void set_claim(uint32_t e, const Claim& claim);
  Claim claim(uint32_t e) const;
  void free_entry(uint32_t e);  // truth and slots; not hash, list or pins
  void forget(uint32_t e);      // out of hash, list and pins, then freed

  void link_pin(uint32_t p);
  void unlink_pin(uint32_t p);
  void void_pin(uint32_t p);
  uint32_t bucket(const RequestId& request) const { return uint32_t(request.low) & (config_.num_buckets - 1); }
  void need(bool fact, const char* what) const {
    if (__builtin_expect(!fact, 0)) throw Damage{what};
  }

  SharedFile& file_;
  const Config& config_;
  Header* header_;
  Entry* entries_;
  Pin* pins_;
  uint64_t* cells_;
  uint32_t *dram_owner_, *ssd_owner_;
  uint32_t *free_entries_, *free_dram_, *free_ssd_, *free_pins_;
  uint32_t* buckets_;
};

template <class Step>
auto Index::sound(Step step) -> decltype(step()) {
  try {
    return step();
  } catch (const Damage&) {
    count(kRepaired);
    rebuild();
  }
  try {
    return step();
  } catch (const Damage& damage) {
    throw PoolFailure{std::string("the pool's index is damaged beyond rebuilding: ") + damage.what};
  }
}

template <class Step>
void Index::fixed(Step step) {
  try {
    step();
  } catch (const Damage&) {
    count(kRepaired);
    rebuild();
  }
}

}  // namespace seer::kvpool
