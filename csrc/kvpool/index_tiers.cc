// SPDX-License-Identifier: Apache-2.0
// Moving blocks between DRAM and SSD: who goes, where to, and how a move begins and ends.
#include "crash_point.h"
#include "index.h"

namespace seer::kvpool {
namespace {

constexpr uint32_t kReserveShare = 16;  // promotion on read leaves 1/16 of DRAM free for puts

}  // namespace

uint32_t Index::take_ssd_slot(bool may_evict) {
  const uint32_t slot = pop(free_ssd_, header_->num_free_ssd, config_.ssd_slots, ssd_owner_);
  if (slot != kNone) return slot;
  // A block that is in both tiers loses nothing with its SSD copy; take the one used last, it stays in DRAM longest.
  for (uint32_t list : {kBothFree, kBothPinned}) {
    const uint32_t e = list_end(list, false);
    if (e == kNone) continue;
    Word at = word(e);
    const uint32_t taken = at.ssd;
    at.ssd = kNoSlot;
    set_word(e, at);
    header_->ssd_bytes -= entries_[e].length;
    relist(e);
    ssd_owner_[taken] = kNone;
    return taken;
  }
  const uint32_t oldest = may_evict ? list_end(kSsdFree, true) : kNone;
  if (oldest == kNone) return kNone;
  count(kEvicted);
  forget(oldest);
  return pop(free_ssd_, header_->num_free_ssd, config_.ssd_slots, ssd_owner_);
}

uint32_t Index::spill_victim() {
  uint32_t victim = kNone;
  for (uint32_t list : {kDramFree, kDramPinned, kBothFree, kBothPinned}) {
    const uint32_t e = list_end(list, true);
    if (e != kNone && (victim == kNone || entries_[e].tick < entries_[victim].tick)) victim = e;
  }
  return victim;
}

uint32_t Index::begin_spill(uint32_t wanted, bool may_evict, std::vector<Move>* moves) {
  uint32_t freed = 0;
  auto one = [&]() -> bool {
    const uint32_t victim = spill_victim();
    if (victim == kNone) return false;
    Entry& me = entries_[victim];
    Word at = word(victim);
    if (at.ssd != kNoSlot) {  // clean: its SSD copy is as good
      const uint32_t slot = at.dram;
      at.dram = kNoSlot;
      set_word(victim, at);
      header_->dram_bytes -= me.length;
      give_dram(slot);
      relist(victim);
      ++freed;
      return true;
    }
    const uint32_t slot = config_.ssd_slots ? take_ssd_slot(may_evict) : kNone;
    if (slot == kNone) {  // nowhere to write to: the least recently used unpinned block goes
      const uint32_t loser = may_evict ? list_end(kDramFree, true) : kNone;
      if (loser == kNone) return false;
      count(kEvicted);
      forget(loser);
      ++freed;
      return true;
    }
    list_remove(victim);  // first what may find damage: a claim once written must not be forgotten
    ssd_owner_[slot] = victim;
    set_claim(victim, Claim{file_.client(), Tier::kSsd, slot});
    ++header_->num_claims;
    moves->push_back(Move{victim, me.generation, at.dram, slot, me.length});
    return true;
  };
  while (freed + moves->size() < wanted && sound(one)) {
  }
  return freed;
}

bool Index::end_spill(const Move& move, bool written) {
  bool freed = false;
  fixed([&] {
    if (mine(move.entry, move.generation, State::kDoomed, Tier::kSsd, move.to)) {
      freed = true;
      return free_entry(move.entry);
    }
    if (!mine(move.entry, move.generation, State::kHeld, Tier::kSsd, move.to)) return;  // lost to a repair
    Word at = word(move.entry);
    if (!written) {
      count(kFailed);
      return cancel(move.entry);
    }
    at.dram = kNoSlot;
    at.ssd = move.to;
    set_word(move.entry, at);  // from here on the block is on SSD, and its DRAM slot is free
    set_claim(move.entry, Claim{});
    may_crash(CrashPoint::kSpillMoved);
    --header_->num_claims;
    header_->dram_bytes -= move.length;
    header_->ssd_bytes += move.length;
    give_dram(move.from);
    list_insert(move.entry);
    count(kSpilled);
    freed = true;
  });
  return freed;
}

bool Index::begin_promote(uint32_t e, bool may_take_last, Move* move) {
  return sound([&] {
    const Word at = word(e);
    if (at.dram != kNoSlot || at.ssd == kNoSlot || claim(e).client != kNone) return false;
    const uint32_t reserve = may_take_last ? 0 : config_.dram_slots / kReserveShare;
    uint32_t slot = kNone;
    if (header_->num_free_dram > reserve)
      slot = pop(free_dram_, header_->num_free_dram, config_.dram_slots, dram_owner_);
    if (slot == kNone) {  // else the DRAM copy of a clean block that was used before this one
      const uint32_t clean_free = list_end(kBothFree, true), clean_pinned = list_end(kBothPinned, true);
      uint32_t clean = clean_free != kNone ? clean_free : clean_pinned;
      if (clean == kNone || entries_[clean].tick >= entries_[e].tick) return false;
      Word other = word(clean);
      slot = other.dram;
      other.dram = kNoSlot;
      set_word(clean, other);
      header_->dram_bytes -= entries_[clean].length;
      relist(clean);
    }
    list_remove(e);
    dram_owner_[slot] = e;
    set_claim(e, Claim{file_.client(), Tier::kDram, slot});
    ++header_->num_claims;
    *move = Move{e, entries_[e].generation, at.ssd, slot, entries_[e].length};
    return true;
  });
}

void Index::end_promote(const Move& move, bool copied) {
  fixed([&] {
    if (mine(move.entry, move.generation, State::kDoomed, Tier::kDram, move.to)) return free_entry(move.entry);
    if (!mine(move.entry, move.generation, State::kHeld, Tier::kDram, move.to)) return;  // lost to a repair
    Word at = word(move.entry);
    if (!copied) return cancel(move.entry);
    at.dram = move.to;
    set_word(move.entry, at);
    set_claim(move.entry, Claim{});
    may_crash(CrashPoint::kPromoteMoved);
    --header_->num_claims;
    header_->dram_bytes += move.length;
    list_insert(move.entry);
    count(kPromoted);
  });
}

void Index::drop_copy(uint32_t e, Tier tier) {
  fixed([&] {
    Word at = word(e);
    const uint32_t slot = tier == Tier::kDram ? at.dram : at.ssd;
    (tier == Tier::kDram ? at.dram : at.ssd) = kNoSlot;
    set_word(e, at);
    (tier == Tier::kDram ? header_->dram_bytes : header_->ssd_bytes) -= entries_[e].length;
    tier == Tier::kDram ? give_dram(slot) : give_ssd(slot);
    if (entries_[e].list != kNone) relist(e);
  });
}

}  // namespace seer::kvpool
