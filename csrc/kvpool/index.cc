#include "index.h"

#include <algorithm>
#include <numeric>

#include "crash_point.h"

namespace seer::kvpool {
namespace {

constexpr uint32_t kReserveShare = 16;  // promotion on read leaves 1/16 of DRAM free for puts

uint32_t tag_check(uint64_t bits56) {
  const uint32_t crc = crc32c_word(0x77, bits56);
  return (crc ^ crc >> 8 ^ crc >> 16 ^ crc >> 24) & 0xFF;
}

}  // namespace

Index::Index(SharedFile& file) : file_(file), config_(file.config()), header_(file.header()) {
  const Sections sections(config_);
  auto words = [&file](uint64_t offset) { return reinterpret_cast<uint32_t*>(file.at(offset)); };
  entries_ = reinterpret_cast<Entry*>(file.at(sections.entries));
  pins_ = reinterpret_cast<Pin*>(file.at(sections.pins));
  cells_ = reinterpret_cast<uint64_t*>(file.at(sections.cells));
  dram_owner_ = words(sections.dram_owner);
  ssd_owner_ = words(sections.ssd_owner);
  free_entries_ = words(sections.free_entries);
  free_dram_ = words(sections.free_dram);
  free_ssd_ = words(sections.free_ssd);
  free_pins_ = words(sections.free_pins);
  buckets_ = words(sections.buckets);
}

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

// ---- truth

Word Index::word(uint32_t e) const {
  Word word;
  need(unpack(entries_[e].word.load(std::memory_order_acquire), &word), "word");
  need(word.dram == kNoSlot || word.dram < config_.dram_slots, "DRAM slot");
  need(word.ssd == kNoSlot || word.ssd < config_.ssd_slots, "SSD slot");
  return word;
}

void Index::set_word(uint32_t e, const Word& word) { entries_[e].word.store(pack(word), std::memory_order_release); }

Claim Index::claim(uint32_t e) const {
  Claim claim;
  need(unpack(entries_[e].claim.load(std::memory_order_acquire), &claim), "claim");
  return claim;
}

void Index::set_claim(uint32_t e, const Claim& claim) {
  entries_[e].claim.store(claim.client == kNone ? 0 : pack(claim), std::memory_order_release);
}

// ---- hash: open addressing, linear probing, deletion by shifting back. A cell is entry + 1 (32 bits), a tag of the
// hash (24) and a check (8); zero is empty.

uint64_t Index::hash(const uint8_t* key) const {
  uint64_t words[4];
  std::memcpy(words, key, kKeyBytes);
  uint64_t h = words[2] ^ (words[3] << 32 | words[3] >> 32) ^ words[0] * 0x9E3779B97F4A7C15ull ^ words[1];
  h = (h ^ h >> 31) * 0xBF58476D1CE4E5B9ull;
  return h ^ h >> 29;
}

uint64_t Index::make_cell(uint64_t h, uint32_t e) const {
  const uint64_t bits = uint64_t{e + 1} << 24 | (h >> 40);
  return bits << 8 | tag_check(bits);
}

uint32_t Index::cell_entry(uint64_t cell) const {
  const uint64_t bits = cell >> 8;
  need((cell & 0xFF) == tag_check(bits), "hash cell");
  const uint32_t e = uint32_t(bits >> 24) - 1;
  need(e < config_.num_entries, "entry in hash cell");
  return e;
}

uint32_t Index::find_cell(const uint8_t* key, uint64_t h) const {
  const uint32_t mask = config_.num_cells - 1;
  uint32_t at = uint32_t(h) & mask;
  for (uint32_t step = 0; step < config_.num_cells; ++step, at = (at + 1) & mask) {
    if (cells_[at] == 0) return kNone;
    const uint32_t e = cell_entry(cells_[at]);
    if (((cells_[at] >> 8) & 0xFFFFFF) != h >> 40) continue;
    const Entry& found = entries_[e];
    need(found.check == found.computed_check(), "entry");
    if (std::memcmp(found.key, key, kKeyBytes) == 0) return at;
  }
  throw Damage{"hash without an empty cell"};
}

uint32_t Index::find(const uint8_t* key) {
  return sound([&] {
    const uint32_t at = find_cell(key, hash(key));
    if (at == kNone) return kNone;
    const uint32_t e = cell_entry(cells_[at]);
    need(word(e).state == State::kHeld, "hashed entry is not held");
    return e;
  });
}

void Index::hash_insert(uint32_t e) {
  const uint64_t h = hash(entries_[e].key);
  const uint32_t mask = config_.num_cells - 1;
  uint32_t at = uint32_t(h) & mask;
  for (uint32_t step = 0; step < config_.num_cells; ++step, at = (at + 1) & mask) {
    if (cells_[at] == 0) {
      cells_[at] = make_cell(h, e);
      return;
    }
  }
  throw Damage{"hash is full"};
}

void Index::hash_erase(uint32_t e) {
  const uint32_t mask = config_.num_cells - 1;
  const uint32_t found = find_cell(entries_[e].key, hash(entries_[e].key));
  need(found != kNone && cell_entry(cells_[found]) == e, "entry is not in the hash");
  uint32_t hole = found;
  for (uint32_t at = (hole + 1) & mask, step = 0; cells_[at] != 0; at = (at + 1) & mask, ++step) {
    need(step < config_.num_cells, "hash without an empty cell");
    const uint32_t home = uint32_t(hash(entries_[cell_entry(cells_[at])].key)) & mask;
    if (((at - home) & mask) >= ((at - hole) & mask)) {  // the hole lies between its home and its place
      cells_[hole] = cells_[at];
      hole = at;
    }
  }
  cells_[hole] = 0;
}

// ---- lists

uint32_t Index::fitting_list(uint32_t e) const {
  const Word at = word(e);
  const uint32_t tiers = at.ssd == kNoSlot ? kDramFree : at.dram == kNoSlot ? kSsdFree : kBothFree;
  return tiers + (entries_[e].pin_head == kNone ? 0 : 1);
}

void Index::list_insert(uint32_t e) {
  Entry& me = entries_[e];
  const uint32_t list = fitting_list(e);
  const uint32_t first = header_->head[list];
  need(first == kNone || (first < config_.num_entries && entries_[first].previous == kNone), "list head");
  me.list = list;
  me.previous = kNone;
  me.next = first;
  if (first == kNone) header_->tail[list] = e;
  else entries_[first].previous = e;
  header_->head[list] = e;
}

void Index::list_remove(uint32_t e) {
  Entry& me = entries_[e];
  if (me.list == kNone) return;
  const uint32_t limit = config_.num_entries;
  need(me.list < kNumLists, "list number");
  need(me.previous == kNone ? header_->head[me.list] == e : me.previous < limit && entries_[me.previous].next == e,
       "previous in list");
  need(me.next == kNone ? header_->tail[me.list] == e : me.next < limit && entries_[me.next].previous == e,
       "next in list");
  (me.previous == kNone ? header_->head[me.list] : entries_[me.previous].next) = me.next;
  (me.next == kNone ? header_->tail[me.list] : entries_[me.next].previous) = me.previous;
  me.list = me.previous = me.next = kNone;
}

uint32_t Index::list_end(uint32_t list, bool least_recent) const {
  const uint32_t e = least_recent ? header_->tail[list] : header_->head[list];
  if (e == kNone) return kNone;
  need(e < config_.num_entries && entries_[e].list == list, "end of list");
  need(entries_[e].check == entries_[e].computed_check(), "entry");
  return e;
}

void Index::relist(uint32_t e) {
  list_remove(e);
  if (word(e).state == State::kHeld && claim(e).client == kNone) list_insert(e);
}

void Index::touch(uint32_t e) {
  entries_[e].tick = ++header_->last_tick;
  fixed([&] {
    if (entries_[e].list != kNone) relist(e);
  });
}

// ---- slots

uint32_t Index::pop(uint32_t* stack, uint32_t& num, uint32_t limit, const uint32_t* owner) {
  if (num == 0) return kNone;
  need(num <= limit, "free count");
  const uint32_t item = stack[num - 1];
  need(item < limit && (!owner || owner[item] == kNone), "free slot");
  --num;
  return item;
}

void Index::give_dram(uint32_t slot) {
  dram_owner_[slot] = kNone;
  need(header_->num_free_dram < config_.dram_slots, "free DRAM slots");
  free_dram_[header_->num_free_dram++] = slot;
}

void Index::give_ssd(uint32_t slot) {
  ssd_owner_[slot] = kNone;
  need(header_->num_free_ssd < config_.ssd_slots, "free SSD slots");
  free_ssd_[header_->num_free_ssd++] = slot;
}

void Index::free_entry(uint32_t e) {
  const Word at = word(e);
  const Claim target = claim(e);
  const uint32_t length = entries_[e].length;
  set_word(e, Word{});
  set_claim(e, Claim{});
  if (target.client != kNone) {
    --header_->num_claims;
    if (target.tier == Tier::kDram) give_dram(target.slot);
    if (target.tier == Tier::kSsd) give_ssd(target.slot);
  }
  if (at.dram != kNoSlot) {
    give_dram(at.dram);
    if (at.state != State::kReserved) header_->dram_bytes -= length;
  }
  if (at.ssd != kNoSlot) {
    give_ssd(at.ssd);
    header_->ssd_bytes -= length;
  }
  need(header_->num_free_entries < config_.num_entries, "free entries");
  free_entries_[header_->num_free_entries++] = e;
}

uint32_t Index::reserve(const uint8_t* key, uint32_t length) {
  return sound([&]() -> uint32_t {
    const uint32_t slot = pop(free_dram_, header_->num_free_dram, config_.dram_slots, dram_owner_);
    if (slot == kNone) return kNone;
    const uint32_t e = pop(free_entries_, header_->num_free_entries, config_.num_entries, nullptr);
    need(e != kNone, "no free entry though a slot is free");
    Entry& me = entries_[e];
    Word old;
    need(!unpack(me.word.load(), &old) || old.state == State::kFree, "free entry");
    std::memcpy(me.key, key, kKeyBytes);
    me.sum = 0;
    me.generation = ++header_->last_generation;
    me.length = length;
    me.check = 0;
    me.list = me.previous = me.next = me.pin_head = kNone;
    dram_owner_[slot] = e;
    ++header_->num_claims;
    set_claim(e, Claim{file_.client(), Tier::kNoTier, kNoSlot});
    set_word(e, Word{State::kReserved, slot, kNoSlot});
    return e;
  });
}

bool Index::mine(uint32_t e, uint64_t generation, State state, Tier tier, uint32_t target) const {
  Word at;
  Claim by;
  return unpack(entries_[e].word.load(), &at) && unpack(entries_[e].claim.load(), &by) && at.state == state &&
         by.client == file_.client() && by.tier == tier && (tier == Tier::kNoTier || by.slot == target) &&
         entries_[e].generation == generation;
}

bool Index::publish(uint32_t e, uint64_t generation, uint64_t block_sum) {
  if (!mine(e, generation, State::kReserved, Tier::kNoTier, kNoSlot)) return false;
  Entry& me = entries_[e];
  Word at;
  unpack(me.word.load(), &at);
  me.sum = block_sum;
  me.tick = ++header_->last_tick;
  me.check = me.computed_check();
  at.state = State::kHeld;
  set_word(e, at);  // from here on it is held, whatever happens to this process
  may_crash(CrashPoint::kPublishing);
  set_claim(e, Claim{});
  fixed([&] {
    --header_->num_claims;
    ++header_->num_held;
    header_->dram_bytes += me.length;
    hash_insert(e);
    list_insert(e);
  });
  return true;
}

void Index::abandon(uint32_t e, uint64_t generation) {
  if (mine(e, generation, State::kReserved, Tier::kNoTier, kNoSlot)) cancel(e);
}

void Index::cancel(uint32_t e) {
  fixed([&] {
    const Word at = word(e);
    if (at.state != State::kHeld) return free_entry(e);
    const Claim target = claim(e);
    set_claim(e, Claim{});
    if (target.client == kNone) return;
    --header_->num_claims;
    if (target.tier == Tier::kDram) give_dram(target.slot);
    if (target.tier == Tier::kSsd) give_ssd(target.slot);
    relist(e);
  });
}

void Index::forget(uint32_t e) {
  // Out of sight first; the entry itself stays while somebody copies from or to its slots (invariant 4).
  hash_erase(e);
  list_remove(e);
  while (entries_[e].pin_head != kNone) void_pin(entries_[e].pin_head);
  --header_->num_held;
  if (claim(e).client != kNone) {
    Word at = word(e);
    at.state = State::kDoomed;
    set_word(e, at);
  } else {
    free_entry(e);
  }
}

void Index::drop(uint32_t e) {
  try {
    forget(e);
  } catch (const Damage&) {
    // Finish in the truth what was begun, then derive the rest.
    Word at;
    if (unpack(entries_[e].word.load(), &at) && at.state == State::kHeld) {
      at.state = entries_[e].claim.load() ? State::kDoomed : State::kFree;
      set_word(e, at.state == State::kFree ? Word{} : at);
    }
    count(kRepaired);
    rebuild();
  }
}

// ---- tiers

uint32_t Index::take_ssd_slot() {
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
  const uint32_t oldest = list_end(kSsdFree, true);
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

uint32_t Index::begin_spill(uint32_t wanted, std::vector<Move>* moves) {
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
    const uint32_t slot = config_.ssd_slots ? take_ssd_slot() : kNone;
    if (slot == kNone) {  // nowhere to write to: the least recently used block that nobody pinned goes
      const uint32_t loser = list_end(kDramFree, true);
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
    set_word(move.entry, at);  // from here on the block is on SSD, and its DRAM slot nobody's
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

// ---- pins

void Index::link_pin(uint32_t p) {
  Pin& pin = pins_[p];
  Entry& of = entries_[pin.entry];
  uint32_t& first = buckets_[bucket(pin.request)];
  need(first == kNone || first < config_.num_pins, "pin bucket");
  need(of.pin_head == kNone || of.pin_head < config_.num_pins, "pin of entry");
  pin.request_previous = kNone;
  pin.request_next = first;
  if (first != kNone) pins_[first].request_previous = p;
  first = p;
  pin.entry_previous = kNone;
  pin.entry_next = of.pin_head;
  if (of.pin_head != kNone) pins_[of.pin_head].entry_previous = p;
  else ++header_->num_pinned;
  of.pin_head = p;
}

void Index::unlink_pin(uint32_t p) {
  Pin& pin = pins_[p];
  const uint32_t limit = config_.num_pins;
  need(pin.entry < config_.num_entries, "entry of pin");
  uint32_t& first = buckets_[bucket(pin.request)];
  Entry& of = entries_[pin.entry];
  auto unlink = [&](uint32_t before, uint32_t after, uint32_t& head, uint32_t Pin::*next, uint32_t Pin::*previous) {
    need(before == kNone ? head == p : before < limit && pins_[before].*next == p, "pin chain");
    need(after == kNone || (after < limit && pins_[after].*previous == p), "pin chain");
    (before == kNone ? head : pins_[before].*next) = after;
    if (after != kNone) pins_[after].*previous = before;
  };
  unlink(pin.request_previous, pin.request_next, first, &Pin::request_next, &Pin::request_previous);
  unlink(pin.entry_previous, pin.entry_next, of.pin_head, &Pin::entry_next, &Pin::entry_previous);
  if (of.pin_head == kNone) --header_->num_pinned;
}

void Index::void_pin(uint32_t p) {
  need(p < config_.num_pins, "pin");
  unlink_pin(p);
  pins_[p].check = 0;
  pins_[p].entry = kNone;
  need(header_->num_free_pins < config_.num_pins, "free pins");
  free_pins_[header_->num_free_pins++] = p;
}

bool Index::pin(uint32_t e, const RequestId& request) {
  const uint32_t p = sound([&]() -> uint32_t {
    uint32_t steps = 0;
    for (uint32_t at = entries_[e].pin_head; at != kNone; at = pins_[at].entry_next) {
      need(at < config_.num_pins && pins_[at].entry == e && steps++ < config_.num_pins, "pin of entry");
      need(pins_[at].check == pins_[at].computed_check(), "pin");
      if (pins_[at].request == request) return kNone - 1;
    }
    return pop(free_pins_, header_->num_free_pins, config_.num_pins, nullptr);
  });
  if (p == kNone - 1) return true;
  if (p == kNone) return false;
  Pin& pin = pins_[p];
  pin.request = request;
  pin.generation = entries_[e].generation;
  pin.entry = e;
  pin.check = pin.computed_check();
  may_crash(CrashPoint::kPinning);
  fixed([&] {
    const bool first = entries_[e].pin_head == kNone;
    link_pin(p);
    if (first && entries_[e].list != kNone) relist(e);
  });
  return true;
}

uint32_t Index::unpin(const RequestId& request, bool drop_blocks) {
  uint32_t num = 0;
  for (;;) {
    const uint32_t p = sound([&]() -> uint32_t {
      uint32_t at = buckets_[bucket(request)], steps = 0;
      for (; at != kNone; at = pins_[at].request_next) {
        need(at < config_.num_pins && steps++ < config_.num_pins, "pin bucket");
        need(pins_[at].check == pins_[at].computed_check(), "pin");
        if (pins_[at].request == request) break;
      }
      return at;
    });
    if (p == kNone) return num;
    const uint32_t e = pins_[p].entry;
    fixed([&] { void_pin(p); });
    may_crash(CrashPoint::kFreeing);
    Word at;
    if (entries_[e].pin_head == kNone && unpack(entries_[e].word.load(), &at) && at.state == State::kHeld) {
      if (drop_blocks) {
        drop(e);
        count(kFreed);
        ++num;
        continue;
      }
      fixed([&] { relist(e); });
    }
    if (!drop_blocks) ++num;
  }
}

// ---- epochs

bool Index::epoch_dropped(const uint8_t* key) const {
  uint64_t epoch;
  std::memcpy(&epoch, key, 8);
  for (const Dropped& dropped : header_->dropped)
    if (dropped.epoch == epoch && dropped.check == uint64_t{crc32c_word(1, epoch)} + 1) return true;
  return false;
}

uint32_t Index::drop_epoch(uint64_t epoch) {
  uint8_t key[8];
  std::memcpy(key, &epoch, 8);
  if (!epoch_dropped(key)) {
    Dropped& record = header_->dropped[header_->next_dropped++ % kMaxDropped];
    record.check = 0;
    record.epoch = epoch;
    record.check = uint64_t{crc32c_word(1, epoch)} + 1;
  }
  // One pass over the truth and one rebuild: linear, and no chain is walked per block.
  uint32_t num = 0;
  for (uint32_t e = 0; e < config_.num_entries; ++e) {
    Word at;
    if (entries_[e].epoch() != epoch || !unpack(entries_[e].word.load(), &at) || at.state != State::kHeld) continue;
    at.state = entries_[e].claim.load() ? State::kDoomed : State::kFree;
    set_word(e, at.state == State::kFree ? Word{} : at);
    may_crash(CrashPoint::kDropping);
    ++num;
  }
  if (num) rebuild();
  count(kFreed, num);
  return num;
}

// ---- recovery

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

void Index::rebuild() {
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
        (me.check != me.computed_check() || me.length > config_.slot_bytes || (at.dram == kNoSlot && at.ssd == kNoSlot))) {
      count(kCorrupt);
      keep = false;
    }
    // An unreadable claim on a good entry: nobody can be told, so the copy it stood for must not be believed. Its
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
    ++h.num_held;  // no two held entries share a key: `put` looks before it publishes, under one lock
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
  std::sort(listed.begin(), listed.end(), [this](uint32_t a, uint32_t b) { return entries_[a].tick < entries_[b].tick; });
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
      expect(at.state == State::kHeld || target.client != kNone, name + " waits for a copy nobody makes");
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
