// SPDX-License-Identifier: Apache-2.0
// Rebuilding what is derived from what is true, and checking that the two agree.
#include <algorithm>

#include "crash_point.h"
#include "index.h"

namespace seer::kvpool {

uint32_t Index::reap() {
  if (header_->num_claims == 0) return 0;
  bool alive[kMaxClients], known[kMaxClients] = {};
  uint32_t num = 0;
  for (uint32_t e = 0; e < config_.num_entries && !num; ++e) {
    Claim at;
    const uint64_t packed = entries_[e].claim.load();
    if (packed == 0) continue;
    if (unpack(packed, &at)) {
      if (!known[at.client]) known[at.client] = true, alive[at.client] = file_.client_alive(at.client);
      if (alive[at.client]) continue;
    }
    ++num;
  }
  if (!num) return 0;
  count(kReaped);
  rebuild();
  return num;
}

void Index::rebuild(OwnClaims own) {
  Header& h = *header_;
  h.num_free_entries = h.num_free_dram = h.num_free_ssd = h.num_free_pins = 0;
  h.num_held = h.num_claims = h.num_pinned = 0;
  h.dram_bytes = h.ssd_bytes = 0;
  std::fill_n(h.head, kNumLists, kNone);
  std::fill_n(h.tail, kNumLists, kNone);
  std::fill_n(dram_owner_, config_.dram_slots, kNone);
  std::fill_n(ssd_owner_, config_.ssd_slots, kNone);
  std::fill_n(cells_, config_.num_cells, uint64_t{0});
  std::fill_n(buckets_, config_.num_buckets, kNone);
  may_crash(CrashPoint::kRebuilding);

  bool known[kMaxClients] = {}, alive[kMaxClients] = {};
  if (own == OwnClaims::kVoid) known[file_.client()] = true;
  auto is_alive = [&](uint32_t client) {
    if (!known[client]) known[client] = true, alive[client] = file_.client_alive(client);
    return alive[client];
  };
  auto owned = [](uint32_t* owner, uint32_t slot, uint32_t limit, uint32_t e) {
    if (slot == kNoSlot) return true;
    if (slot >= limit || owner[slot] != kNone) return false;
    owner[slot] = e;
    return true;
  };

  std::vector<uint32_t> listed;
  for (uint32_t e = 0; e < config_.num_entries; ++e) {
    Entry& me = entries_[e];
    me.list = me.previous = me.next = me.pin_head = kNone;
    const uint64_t packed = me.word.load();
    Word at;
    Claim target;
    const bool readable = unpack(packed, &at);
    if (packed != 0 && !readable) count(kCorrupt);
    bool keep = readable && at.state != State::kFree;
    if (keep && at.state == State::kHeld &&
        (me.check != me.computed_check() || me.length > config_.slot_bytes ||
         (at.dram == kNoSlot && at.ssd == kNoSlot))) {
      count(kCorrupt);
      keep = false;
    }
    // Half of one entry written over another: of two that have a key the first stays, and its checksum tells whether the
    // bytes are right. A second one could never be found, and so never leave.
    if (keep && at.state == State::kHeld && find_cell(me.key, hash(me.key)) != kNone) keep = false, count(kCorrupt);
    // An unreadable claim on a good entry: its owner cannot be found, so the copy it stood for must not be believed. Its
    // copier finds its own claim gone and gives up; the target slot may still be written to once, and then the checksum
    // of whoever got that slot tells.
    bool claimed = unpack(me.claim.load(), &target) && target.client != kNone && is_alive(target.client);
    if (keep && at.state != State::kHeld && !claimed) keep = false;
    if (keep && !owned(dram_owner_, at.dram, config_.dram_slots, e)) keep = false, count(kCorrupt);
    if (keep && !owned(ssd_owner_, at.ssd, config_.ssd_slots, e)) {
      if (at.dram != kNoSlot) dram_owner_[at.dram] = kNone;
      keep = false, count(kCorrupt);
    }
    if (keep && claimed && target.tier == Tier::kDram && !owned(dram_owner_, target.slot, config_.dram_slots, e))
      claimed = false;
    if (keep && claimed && target.tier == Tier::kSsd && !owned(ssd_owner_, target.slot, config_.ssd_slots, e))
      claimed = false;
    if (!keep) {
      set_word(e, Word{});
      set_claim(e, Claim{});
      free_entries_[h.num_free_entries++] = e;
      continue;
    }
    if (!claimed) set_claim(e, Claim{});
    h.num_claims += claimed;
    h.last_generation = std::max(h.last_generation, me.generation);
    if (at.state == State::kReserved) continue;
    if (at.dram != kNoSlot) h.dram_bytes += me.length;
    if (at.ssd != kNoSlot) h.ssd_bytes += me.length;
    if (at.state == State::kDoomed) continue;
    ++h.num_held;
    hash_insert(e);
    if (!claimed) listed.push_back(e);
  }
  for (uint32_t s = config_.dram_slots; s-- > 0;)
    if (dram_owner_[s] == kNone) free_dram_[h.num_free_dram++] = s;
  for (uint32_t s = config_.ssd_slots; s-- > 0;)
    if (ssd_owner_[s] == kNone) free_ssd_[h.num_free_ssd++] = s;

  for (uint32_t p = config_.num_pins; p-- > 0;) {
    Pin& pin = pins_[p];
    Word at;
    const bool valid = pin.check != 0 && pin.check == pin.computed_check() && pin.entry < config_.num_entries &&
                       entries_[pin.entry].generation == pin.generation &&
                       unpack(entries_[pin.entry].word.load(), &at) && at.state == State::kHeld;
    if (valid) {
      link_pin(p);
    } else {
      pin.check = 0;
      pin.entry = kNone;
      free_pins_[h.num_free_pins++] = p;
    }
  }
  std::sort(listed.begin(), listed.end(),
            [this](uint32_t a, uint32_t b) { return entries_[a].tick < entries_[b].tick; });
  for (uint32_t e : listed) list_insert(e);
  if (!listed.empty()) h.last_tick = std::max(h.last_tick, entries_[listed.back()].tick);
  SharedFile::ring(h.room_bell);
}

std::vector<std::string> Index::problems() {
  std::vector<std::string> found;
  auto expect = [&found](bool fact, const std::string& what) {
    if (!fact) found.push_back(what);
  };
  const Header& h = *header_;
  uint32_t held = 0, used = 0, claims = 0, listed = 0, pinned = 0;
  uint64_t dram_bytes = 0, ssd_bytes = 0;
  std::vector<uint32_t> dram(config_.dram_slots, kNone), ssd(config_.ssd_slots, kNone);
  auto own = [&](std::vector<uint32_t>& owner, uint32_t slot, uint32_t e) {
    if (slot == kNoSlot) return;
    if (slot >= owner.size()) return expect(false, "entry " + std::to_string(e) + " has a slot out of range");
    expect(owner[slot] == kNone, "slot " + std::to_string(slot) + " has two entries");
    owner[slot] = e;
  };
  for (uint32_t e = 0; e < config_.num_entries; ++e) try {
      const std::string name = "entry " + std::to_string(e);
      const Word at = word(e);
      if (at.state == State::kFree) continue;
      ++used;
      const Claim target = claim(e);
      claims += target.client != kNone;
      own(dram, at.dram, e);
      own(ssd, at.ssd, e);
      if (target.client != kNone && target.tier == Tier::kDram) own(dram, target.slot, e);
      if (target.client != kNone && target.tier == Tier::kSsd) own(ssd, target.slot, e);
      expect(at.state == State::kHeld || target.client != kNone, name + " waits for a copy that is not being made");
      if (at.state == State::kReserved) continue;
      if (at.dram != kNoSlot) dram_bytes += entries_[e].length;
      if (at.ssd != kNoSlot) ssd_bytes += entries_[e].length;
      if (at.state != State::kHeld) continue;
      ++held;
      pinned += entries_[e].pin_head != kNone;
      expect(entries_[e].check == entries_[e].computed_check(), name + " fails its check");
      const uint32_t cell = find_cell(key(e), hash(key(e)));
      expect(cell != kNone && cell_entry(cells_[cell]) == e, name + " is not in the hash");
      expect((entries_[e].list == kNone) == (target.client != kNone), name + " is listed though claimed, or neither");
      if (target.client == kNone) expect(entries_[e].list == fitting_list(e), name + " is in the wrong list");
    } catch (const Damage& damage) {
      expect(false, std::string("entry ") + std::to_string(e) + ": damaged " + damage.what);
    }
  for (uint32_t list = 0; list < kNumLists; ++list) {
    uint32_t before = kNone;
    for (uint32_t e = h.head[list]; e != kNone; before = e, e = entries_[e].next) {
      if (e >= config_.num_entries || entries_[e].list != list || entries_[e].previous != before) {
        expect(false, "list " + std::to_string(list) + " is broken");
        break;
      }
      if (++listed > config_.num_entries) break;
    }
  }
  uint32_t claimed_held = 0;
  for (uint32_t e = 0; e < config_.num_entries; ++e) {
    Word at;
    if (unpack(entries_[e].word.load(), &at) && at.state == State::kHeld && entries_[e].claim.load()) ++claimed_held;
  }
  auto equal = [&](uint64_t left, uint64_t right, const char* what) {
    expect(left == right, std::string(what) + ": " + std::to_string(left) + " is not " + std::to_string(right));
  };
  equal(h.num_held, held, "held entries");
  equal(listed + claimed_held, held, "listed entries");
  equal(h.num_claims, claims, "claims");
  equal(h.num_pinned, pinned, "pinned entries");
  equal(h.dram_bytes, dram_bytes, "DRAM bytes");
  equal(h.ssd_bytes, ssd_bytes, "SSD bytes");
  equal(h.num_free_entries + used, config_.num_entries, "entries");
  equal(h.num_free_dram, uint64_t(std::count(dram.begin(), dram.end(), kNone)), "free DRAM slots");
  equal(h.num_free_ssd, uint64_t(std::count(ssd.begin(), ssd.end(), kNone)), "free SSD slots");
  uint32_t pins = 0;
  for (uint32_t p = 0; p < config_.num_pins; ++p) pins += pins_[p].check != 0;
  equal(h.num_free_pins + pins, config_.num_pins, "pins");
  uint32_t cells = 0;
  for (uint32_t c = 0; c < config_.num_cells; ++c) cells += cells_[c] != 0;
  equal(cells, held, "hash cells");
  return found;
}

}  // namespace seer::kvpool
