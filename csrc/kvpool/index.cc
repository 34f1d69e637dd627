// SPDX-License-Identifier: Apache-2.0
// Truth, hash, lists and slots of the index, and the life of an entry.
#include "index.h"

#include "crash_point.h"

namespace seer::kvpool {
namespace {

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

void Index::give_up(uint32_t e, uint64_t generation) {
  Word at;
  Claim by;
  if (unpack(entries_[e].word.load(), &at) && unpack(entries_[e].claim.load(), &by) && at.state != State::kFree &&
      by.client == file_.client() && entries_[e].generation == generation)
    cancel(e);
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

// ---- weights versions

bool Index::weights_version_dropped(const uint8_t* key) const {
  uint64_t weights_version;
  std::memcpy(&weights_version, key, 8);
  for (const Dropped& dropped : header_->dropped)
    if (dropped.weights_version == weights_version && dropped.check == uint64_t{crc32c_word(1, weights_version)} + 1)
      return true;
  return false;
}

uint32_t Index::drop_weights_version(uint64_t weights_version) {
  uint8_t key[8];
  std::memcpy(key, &weights_version, 8);
  if (!weights_version_dropped(key)) {
    Dropped& record = header_->dropped[header_->next_dropped++ % kMaxDropped];
    record.check = 0;
    record.weights_version = weights_version;
    record.check = uint64_t{crc32c_word(1, weights_version)} + 1;
  }
  // One pass over the truth and one rebuild: linear, and no chain is walked per block.
  uint32_t num = 0;
  for (uint32_t e = 0; e < config_.num_entries; ++e) {
    Word at;
    if (entries_[e].weights_version() != weights_version || !unpack(entries_[e].word.load(), &at) ||
        at.state != State::kHeld)
      continue;
    at.state = entries_[e].claim.load() ? State::kDoomed : State::kFree;
    set_word(e, at.state == State::kFree ? Word{} : at);
    may_crash(CrashPoint::kDropping);
    ++num;
  }
  if (num) rebuild();
  count(kFreed, num);
  return num;
}

}  // namespace seer::kvpool
