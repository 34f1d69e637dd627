// SPDX-License-Identifier: Apache-2.0
// The local pool: an index and DRAM slots in a shared file, over a preallocated slab file on SSD.
//
// Every call that moves bytes has three parts: note under the lock what is to be done, move the bytes without it, and
// under the lock again make it true. Nothing but index work happens under the lock, so one slow copy, or one killed
// process, stops no other process.
//
// Invariants
//   1. A put is acknowledged only after its entry is held: data first, then index, then the answer.
//   2. A spilled block's DRAM slot is given away only after its entry says "SSD" (never both steps in one).
//   3. `get` copies without the lock and believes the copy only when its checksum is the entry's. A mismatch is
//      corruption if the entry has not changed during the copy, else the copy is tried again.
//   4. No wait is longer than the deadline the arena was opened with.
//   5. A copy whose end could not be noted, because the lock was not given in time, is given up by the next call of this
//      process that gets the lock. No other process may: this one lives, and could still be copying.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "index.h"

namespace seer::kvpool {

struct Buffer {
  uint8_t* data;
  size_t bytes;
};

class Arena {
 public:
  static void create(const std::string& arena_path, const std::string& slab_path, Config config);
  Arena(const std::string& arena_path, const std::string& slab_path, double deadline_s, bool populate);
  ~Arena();

  uint32_t lookup(const uint8_t* keys, size_t num);
  // Pins what it holds: for no request, for the one given, or each block for its own.
  std::vector<bool> put(const uint8_t* keys, const std::vector<Buffer>& blocks, const std::vector<RequestId>& requests);
  std::vector<bool> get(const uint8_t* keys, const std::vector<Buffer>& blocks, bool promote);
  uint32_t pin(const RequestId& request, const uint8_t* keys, size_t num);
  uint32_t unpin(const RequestId& request, bool drop_blocks);
  uint32_t promote(const uint8_t* keys, size_t num);  // SSD to DRAM, making room where needed
  uint32_t drop_weights_version(uint64_t weights_version);
  uint32_t spill(uint32_t wanted, bool may_evict);  // returns DRAM slots freed
  uint32_t reap();
  void rebuild();

  // One round of house keeping: wait until DRAM runs low or the time is over, then spill and reap. False when another
  // process keeps house already.
  bool keep(double wait_s);
  void stop_keeping();  // wakes `keep`

  struct Place {
    bool held;
    uint32_t entry, dram, ssd, length;
  };
  Place locate(const uint8_t* key);
  std::vector<std::string> problems();
  SharedFile& file() { return file_; }
  uint64_t dram_offset(uint32_t slot) const { return sections_.data + slot * file_.config().stride_bytes; }
  uint64_t ssd_offset(uint32_t slot) const { return kPage + slot * file_.config().stride_bytes; }
  const Sections& sections() const { return sections_; }

 private:
  class Locked;
  struct Copy {  // under way: the entry, as it was when the copy began
    uint32_t entry;
    uint64_t generation;
  };
  Locked lock_to_end(const std::vector<Copy>& copies);
  void give_up_unended();
  struct Found {  // an entry as it was under the lock
    uint32_t entry = kNone;
    uint64_t generation = 0, word = 0, sum = 0;
    uint32_t length = 0;
  };
  Found look(const uint8_t* key, bool touch);
  bool read_block(const uint8_t* key, Found found, const Buffer& block, bool* from_ssd);
  bool promote_one(const uint8_t* key);
  void promote_from(const uint8_t* key, const Buffer& block);
  enum class Room { kFreed, kWait, kFull };
  Room make_room(uint32_t wanted);
  uint32_t low_water() const;
  void ring_if_low();
  void timed(Call call, double started_s);

  SharedFile file_;
  Sections sections_;
  Index index_;
  int slab_ = -1;
  double deadline_s_;
  bool keeper_stuck_ = false;  // the last round of `keep` found nothing it may move
  std::atomic<bool> stopping_{false};
  std::mutex unended_mutex_;
  std::vector<Copy> unended_;  // invariant 5
  std::atomic<bool> has_unended_{false};
};

}  // namespace seer::kvpool
