// SPDX-License-Identifier: Apache-2.0
// The arena and its index under random operations, against a twin that keeps plain vectors and knows exactly which
// block is where, in which order blocks leave a tier, and who pinned what.
#include <algorithm>
#include <memory>
#include <optional>

#include "kvpool/tests/fixture.h"

using namespace seer::kvpool;

namespace {

constexpr uint32_t kNumNames = 30;
constexpr uint32_t kNumRequests = 4;

Name name_of(uint32_t number) { return {1 + number % 3, number}; }
RequestId request_of(uint32_t number) { return {number * 16 + 1, 7}; }  // all in one bucket of the pins

struct Block {
  bool dram = false, ssd = false;
  uint64_t last_use = 0;
  std::vector<uint32_t> pins;  // records, the newest first
};

struct PinRecord {
  bool used = false;
  uint32_t request = 0, name = 0;
};

// What an arena must do when one call at a time is made.
class Twin {
 public:
  Twin(uint32_t dram_slots, uint32_t ssd_slots, uint32_t num_pins)
      : dram_slots_(dram_slots), ssd_slots_(ssd_slots), records_(num_pins), of_request_(kNumRequests) {
    rebuild();
  }

  std::vector<bool> put(const std::vector<uint32_t>& names, std::optional<uint32_t> request) {
    std::vector<bool> held(names.size(), false);
    const auto is_held = [&](size_t i) {
      if (!holds(names[i])) return false;
      use(names[i]);
      held[i] = !request || pin_one(names[i], *request);
      return true;
    };
    for (size_t next = 0; next < names.size();) {
      std::vector<size_t> reserved;
      bool no_room = false;
      for (; next < names.size() && reserved.size() < 16; ++next) {
        if (is_dropped(names[next]) || is_held(next)) continue;
        if (free_dram() == reserved.size()) {
          no_room = true;
          break;
        }
        reserved.push_back(next);
      }
      for (const size_t i : reserved) {
        if (is_held(i)) continue;  // twice in this call
        blocks_[names[i]] = Block{true, false, ++last_use_, {}};
        to_front(names[i]);
        held[i] = !request || pin_one(names[i], *request);
      }
      if (no_room && spill(uint32_t(std::min<size_t>(names.size() - next, 16)), true) == 0 && free_dram() == 0) break;
    }
    return held;
  }

  std::vector<bool> get(const std::vector<uint32_t>& names, bool may_promote) {
    std::vector<bool> got;
    for (const uint32_t name : names)
      if (holds(name)) use(name);
    for (const uint32_t name : names) {
      got.push_back(holds(name));
      if (may_promote && holds(name) && !blocks_[name].dram) begin_promote(name, dram_slots_ / 16);
    }
    return got;
  }

  uint32_t promote(const std::vector<uint32_t>& names) {
    uint32_t num = 0;
    for (const uint32_t name : names) {
      if (!holds(name)) continue;
      use(name);
      if (blocks_[name].dram) continue;
      num += begin_promote(name, 0) || (spill(16, false) > 0 && begin_promote(name, 0));
    }
    return num;
  }

  uint32_t lookup(const std::vector<uint32_t>& names) const {
    uint32_t num = 0;
    while (num < names.size() && holds(names[num])) ++num;
    return num;
  }

  uint32_t pin(uint32_t request, const std::vector<uint32_t>& names) {
    for (uint32_t i = 0; i < names.size(); ++i) {
      if (!holds(names[i]) || !pin_one(names[i], request)) return i;
      use(names[i]);
    }
    return uint32_t(names.size());
  }

  uint32_t unpin(uint32_t request, bool drop_blocks) {
    uint32_t num = 0;
    while (!of_request_[request].empty()) {
      const uint32_t record = of_request_[request].front(), name = records_[record].name;
      void_pin(record);
      const bool last = blocks_[name].pins.empty();
      if (last && drop_blocks) forget(name);
      if (last && !drop_blocks) to_front(name);
      num += !drop_blocks || last;
    }
    return num;
  }

  uint32_t drop_weights_version(uint64_t weights_version) {
    uint32_t num = 0;
    dropped_.push_back(weights_version);
    for (uint32_t name = 0; name < kNumNames; ++name) {
      if (name_of(name).weights_version != weights_version || !holds(name)) continue;
      for (const uint32_t record : blocks_[name].pins) records_[record].used = false;
      blocks_[name] = Block{};
      ++num;
    }
    if (num) rebuild();
    return num;
  }

  uint32_t spill(uint32_t wanted, bool may_evict) {
    uint32_t freed = 0;
    std::vector<uint32_t> moving;  // their SSD slots are taken, and they are in no list
    while (freed + moving.size() < wanted) {
      std::optional<uint32_t> victim;
      for (const List list : {kDramFree, kDramPinned, kBothFree, kBothPinned})
        if (!lists_[list].empty() && (!victim || blocks_[lists_[list].back()].last_use < blocks_[*victim].last_use))
          victim = lists_[list].back();
      if (!victim) break;
      if (blocks_[*victim].ssd) {
        blocks_[*victim].dram = false;
        to_front(*victim);
        ++freed;
      } else if (ssd_slots_ > 0 && take_ssd_slot(uint32_t(moving.size()), may_evict)) {
        out_of_lists(*victim);
        moving.push_back(*victim);
      } else if (may_evict && !lists_[kDramFree].empty()) {
        forget(lists_[kDramFree].back());
        ++freed;
      } else {
        break;
      }
    }
    for (const uint32_t name : moving) {
      blocks_[name].dram = false;
      blocks_[name].ssd = true;
      to_front(name);
      ++freed;
    }
    return freed;
  }

  // Lists by last use, records and chains by number: the only order that can be found again in the file.
  void rebuild() {
    std::vector<uint32_t> held;
    for (uint32_t name = 0; name < kNumNames; ++name) {
      out_of_lists(name);
      blocks_[name].pins.clear();
      if (holds(name)) held.push_back(name);
    }
    free_records_.clear();
    for (std::vector<uint32_t>& chain : of_request_) chain.clear();
    for (uint32_t record = uint32_t(records_.size()); record-- > 0;) {
      if (records_[record].used) link(record);
      else free_records_.push_back(record);
    }
    std::sort(held.begin(), held.end(),
              [this](uint32_t a, uint32_t b) { return blocks_[a].last_use < blocks_[b].last_use; });
    for (const uint32_t name : held) to_front(name);
  }

  bool holds(uint32_t name) const { return blocks_[name].dram || blocks_[name].ssd; }

  // The same blocks in the same places and lists, and the same totals.
  void check(Arena& arena) const {
    CHECK(is_sound(arena));
    const Header& header = *arena.file().header();
    const auto* entries = reinterpret_cast<const Entry*>(arena.file().at(arena.sections().entries));
    uint32_t held = 0, pinned = 0;
    uint64_t dram_bytes = 0, ssd_bytes = 0;
    for (uint32_t name = 0; name < kNumNames; ++name) {
      const Arena::Place place = arena.locate(key_of(name_of(name)).data());
      const Block& block = blocks_[name];
      CHECK(place.held == holds(name));
      if (!place.held) continue;
      CHECK((place.dram != kNoSlot) == block.dram);
      CHECK((place.ssd != kNoSlot) == block.ssd);
      CHECK(place.length == block_of(name_of(name)).size());
      ++held;
      pinned += !block.pins.empty();
      dram_bytes += block.dram ? place.length : 0;
      ssd_bytes += block.ssd ? place.length : 0;
    }
    CHECK(header.num_held == held && header.num_pinned == pinned && header.num_claims == 0);
    CHECK(header.dram_bytes == dram_bytes && header.ssd_bytes == ssd_bytes);
    CHECK(header.num_free_dram == free_dram() && header.num_free_pins == free_records_.size());
    for (uint32_t list = 0; list < kNumLists; ++list) {
      uint32_t at = header.head[list];
      for (const uint32_t name : lists_[list]) {
        CHECK(at != kNone &&
              key_of(name_of(name)) == std::vector<uint8_t>(entries[at].key, entries[at].key + kKeyBytes));
        at = entries[at].next;
      }
      CHECK(at == kNone);
    }
    for (const Counter never : {kCorrupt, kFailed, kRepaired, kReaped, kWrongSize}) CHECK(counter(arena, never) == 0);
  }

 private:
  bool is_dropped(uint32_t name) const {
    return std::find(dropped_.begin(), dropped_.end(), name_of(name).weights_version) != dropped_.end();
  }
  uint32_t free_dram() const {
    return dram_slots_ - uint32_t(std::count_if(blocks_.begin(), blocks_.end(), [](const Block& b) { return b.dram; }));
  }
  uint32_t free_ssd() const {
    return ssd_slots_ - uint32_t(std::count_if(blocks_.begin(), blocks_.end(), [](const Block& b) { return b.ssd; }));
  }

  void out_of_lists(uint32_t name) {
    for (std::vector<uint32_t>& list : lists_) list.erase(std::remove(list.begin(), list.end(), name), list.end());
  }
  void to_front(uint32_t name) {
    out_of_lists(name);
    const Block& block = blocks_[name];
    const List tiers = !block.ssd ? kDramFree : !block.dram ? kSsdFree : kBothFree;
    std::vector<uint32_t>& list = lists_[tiers + !block.pins.empty()];
    list.insert(list.begin(), name);
  }
  void use(uint32_t name) {
    blocks_[name].last_use = ++last_use_;
    to_front(name);
  }
  void forget(uint32_t name) {
    while (!blocks_[name].pins.empty()) void_pin(blocks_[name].pins.front());
    out_of_lists(name);
    blocks_[name] = Block{};
  }

  bool take_ssd_slot(uint32_t num_moving, bool may_evict) {
    if (free_ssd() > num_moving) return true;
    for (const List list : {kBothFree, kBothPinned}) {
      if (lists_[list].empty()) continue;
      const uint32_t name = lists_[list].front();
      blocks_[name].ssd = false;
      to_front(name);
      return true;
    }
    if (!may_evict || lists_[kSsdFree].empty()) return false;
    forget(lists_[kSsdFree].back());
    return true;
  }
  bool begin_promote(uint32_t name, uint32_t num_left) {
    if (free_dram() <= num_left) {
      const List list = lists_[kBothFree].empty() ? kBothPinned : kBothFree;
      if (lists_[list].empty()) return false;
      const uint32_t clean = lists_[list].back();
      if (blocks_[clean].last_use >= blocks_[name].last_use) return false;
      blocks_[clean].dram = false;
      to_front(clean);
    }
    blocks_[name].dram = true;
    to_front(name);
    return true;
  }

  void link(uint32_t record) {
    std::vector<uint32_t>& of_block = blocks_[records_[record].name].pins;
    std::vector<uint32_t>& of_request = of_request_[records_[record].request];
    of_block.insert(of_block.begin(), record);
    of_request.insert(of_request.begin(), record);
  }
  void void_pin(uint32_t record) {
    for (std::vector<uint32_t>* chain : {&blocks_[records_[record].name].pins, &of_request_[records_[record].request]})
      chain->erase(std::find(chain->begin(), chain->end(), record));
    records_[record].used = false;
    free_records_.push_back(record);
  }
  bool pin_one(uint32_t name, uint32_t request) {
    for (const uint32_t record : blocks_[name].pins)
      if (records_[record].request == request) return true;
    if (free_records_.empty()) return false;
    const bool first = blocks_[name].pins.empty();
    records_[free_records_.back()] = {true, request, name};
    link(free_records_.back());
    free_records_.pop_back();
    if (first) to_front(name);
    return true;
  }

  uint32_t dram_slots_, ssd_slots_;
  std::vector<Block> blocks_{kNumNames};
  std::vector<uint32_t> lists_[kNumLists];  // the most recent first
  std::vector<PinRecord> records_;
  std::vector<uint32_t> free_records_;             // the next at the end
  std::vector<std::vector<uint32_t>> of_request_;  // records, the newest first
  std::vector<uint64_t> dropped_;
  uint64_t last_use_ = 0;
};

std::vector<Name> named(const std::vector<uint32_t>& numbers) {
  std::vector<Name> names;
  for (const uint32_t number : numbers) names.push_back(name_of(number));
  return names;
}

void arena_and_twin_agree(std::mt19937& rng, uint32_t dram_slots, uint32_t ssd_slots, uint32_t num_pins,
                          int num_calls) {
  Folder folder;
  Arena::create(folder.arena(), folder.slab(), test_config(dram_slots, ssd_slots, num_pins));
  Twin twin(dram_slots, ssd_slots, num_pins);
  std::unique_ptr<Arena> clients[2];
  for (auto& client : clients) client = std::make_unique<Arena>(folder.arena(), folder.slab(), kDeadline_s, false);
  for (int call = 0; call < num_calls; ++call) {
    Arena& arena = *clients[rng() % 2];
    std::vector<uint32_t> names(1 + rng() % (rng() % 8 ? 6 : 40));
    for (uint32_t& name : names) name = rng() % kNumNames;
    const uint32_t request = rng() % kNumRequests, wanted = rng() % 12;
    const bool flag = rng() % 2;
    switch (rng() % 12) {
      case 0:
      case 1:
        CHECK(put(arena, named(names), {}) == twin.put(names, {}));
        break;
      case 2:
        CHECK(put(arena, named(names), {request_of(request)}) == twin.put(names, request));
        break;
      case 3:
      case 4:
        CHECK(get(arena, named(names), flag) == twin.get(names, flag));
        break;
      case 5:
        CHECK(arena.lookup(keys_of(named(names)).data(), names.size()) == twin.lookup(names));
        break;
      case 6:
        CHECK(arena.pin(request_of(request), keys_of(named(names)).data(), names.size()) == twin.pin(request, names));
        break;
      case 7:
        CHECK(arena.unpin(request_of(request), flag) == twin.unpin(request, flag));
        break;
      case 8:
        CHECK(arena.spill(wanted, flag) == twin.spill(wanted, flag));
        break;
      case 9:
        CHECK(arena.promote(keys_of(named(names)).data(), names.size()) == twin.promote(names));
        break;
      case 10:
        if (rng() % 30 == 0)
          CHECK(arena.drop_weights_version(1 + request % 3) == twin.drop_weights_version(1 + request % 3));
        break;
      default: {
        if (flag) arena.rebuild();
        else
          clients[0] = nullptr, clients[0] = std::make_unique<Arena>(folder.arena(), folder.slab(), kDeadline_s, false);
        twin.rebuild();
      }
    }
    twin.check(*clients[1]);
  }
}

// Flip bytes of what is derived. Until it is rebuilt a block may be missing; wrong bytes never come, and after it all
// blocks are there: the truth was not touched.
void damage_to_derived_data_loses_nothing(std::mt19937& rng) {
  Folder folder;
  Arena::create(folder.arena(), folder.slab(), test_config(8, 24));
  Arena arena(folder.arena(), folder.slab(), kDeadline_s, false);
  std::vector<uint32_t> all(kNumNames - 6);
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  const std::vector<bool> put_all = put(arena, named(all), {request_of(0)});
  CHECK(std::count(put_all.begin(), put_all.end(), true) == std::ptrdiff_t(all.size()));
  const Sections& sections = arena.sections();
  for (int round = 0; round < 60; ++round) {
    for (int flips = 0; flips < 1 + round % 8; ++flips) {
      const bool in_header = rng() % 4 == 0;
      const uint64_t from = in_header ? offsetof(Header, num_held) : sections.cells;
      const uint64_t to = in_header ? offsetof(Header, clients) : sections.data;
      *arena.file().at(from + rng() % (to - from)) ^= uint8_t(1u << rng() % 8);
    }
    for (int reads = 0; reads < 5; ++reads) get(arena, {name_of(rng() % kNumNames)}, false);
    arena.pin(request_of(0), keys_of(named(all)).data(), 3);
    arena.rebuild();
    CHECK(is_sound(arena));
    const std::vector<bool> got = get(arena, named(all), true);
    CHECK(std::count(got.begin(), got.end(), true) == std::ptrdiff_t(all.size()));
  }
}

// A block whose bytes changed is not handed out, and the other copy is, where there is one.
void damage_to_a_block_is_seen() {
  Folder folder;
  Arena::create(folder.arena(), folder.slab(), test_config(8, 8));
  Arena arena(folder.arena(), folder.slab(), kDeadline_s, false);
  CHECK(put(arena, {name_of(1), name_of(2)}, {}) == std::vector<bool>(2, true));
  CHECK(arena.spill(2, false) == 2);
  CHECK(arena.promote(keys_of({name_of(1), name_of(2)}).data(), 2) == 2);
  for (const uint32_t name : {1u, 2u}) {
    const Arena::Place place = arena.locate(key_of(name_of(name)).data());
    CHECK(place.dram != kNoSlot && place.ssd != kNoSlot);
    *arena.file().at(arena.dram_offset(place.dram) + 100) ^= 4;
    if (name == 1) continue;
    CHECK(get(arena, {name_of(2)}, false)[0]);
    CHECK(arena.locate(key_of(name_of(2)).data()).dram == kNoSlot);
  }
  const Arena::Place place = arena.locate(key_of(name_of(1)).data());
  const std::string zeros(kBlockBytes, '\0');
  std::FILE* slab = std::fopen(folder.slab().c_str(), "r+b");
  CHECK(slab && !std::fseek(slab, long(arena.ssd_offset(place.ssd)), SEEK_SET));
  CHECK(std::fwrite(zeros.data(), 1, zeros.size(), slab) == zeros.size());
  std::fclose(slab);
  CHECK(!get(arena, {name_of(1)}, false)[0]);
  CHECK(!arena.locate(key_of(name_of(1)).data()).held);
  CHECK(counter(arena, kCorrupt) == 3);
  CHECK(is_sound(arena));
}

}  // namespace

int main() {
  std::mt19937 rng(static_cast<unsigned>(seer::testing::seed()));
  for (int round = 0; round < 6; ++round) {
    arena_and_twin_agree(rng, 8, 40, 200, 150);  // everything fits
    arena_and_twin_agree(rng, 4, 6, 200, 150);   // little fits
    arena_and_twin_agree(rng, 6, 0, 200, 150);   // one tier
    arena_and_twin_agree(rng, 18, 5, 12, 150);   // promotion leaves a slot free; pins run out
  }
  damage_to_derived_data_loses_nothing(rng);
  damage_to_a_block_is_seen();
  return seer::testing::passed("arena");
}
