// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "crash_point.h"

namespace seer::kvpool {
namespace {

constexpr size_t kReadPiece = 256 << 10;  // read from SSD and summed while it is still in the L2 cache
constexpr uint32_t kSpillBatch = 16;
constexpr uint32_t kPutBatch = 16;
constexpr uint32_t kGetBatch = 64;
constexpr int kReadTries = 8;
constexpr double kRoomWait_s = 0.05;

[[noreturn]] void fail(const std::string& what, int error) { throw PoolFailure{what + ": " + std::strerror(error)}; }

bool read_all(int fd, uint8_t* to, size_t bytes, uint64_t offset) {
  while (bytes) {
    const ssize_t got = ::pread(fd, to, bytes, off_t(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got, offset += uint64_t(got), bytes -= size_t(got);
  }
  return true;
}

bool write_all(int fd, const uint8_t* from, size_t bytes, uint64_t offset) {
  while (bytes) {
    const ssize_t put = ::pwrite(fd, from, bytes, off_t(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    from += put, offset += uint64_t(put), bytes -= size_t(put);
  }
  return true;
}

// False when the read failed; else `sum` is that of the bytes now in `to`.
bool read_summed(int fd, uint8_t* to, size_t bytes, uint64_t offset, uint64_t* block_sum) {
  Summer summer;
  for (size_t done = 0; done < bytes; done += kReadPiece) {
    const size_t piece = std::min(kReadPiece, bytes - done);
    if (!read_all(fd, to + done, piece, offset + done)) return false;
    summer.add(to + done, piece);
  }
  *block_sum = summer.finish(bytes);
  return true;
}

}  // namespace

class Arena::Locked {
 public:
  explicit Locked(Arena& arena) : file_(arena.file_) {
    file_.check_process();
    if (!file_.lock(Deadline::after(arena.deadline_s_))) {  // its last owner died inside
      arena.index_.count(kRepaired);
      arena.index_.rebuild();
      file_.lock_is_consistent();
    }
    if (arena.has_unended_) arena.give_up_unended();
  }
  Locked(const Locked&) = delete;
  ~Locked() { file_.unlock(); }

 private:
  SharedFile& file_;
};

Arena::Locked Arena::lock_to_end(const std::vector<Copy>& copies) {
  try {
    return Locked(*this);
  } catch (const PoolFailure&) {
    const std::lock_guard<std::mutex> hold(unended_mutex_);
    unended_.insert(unended_.end(), copies.begin(), copies.end());
    has_unended_ = true;
    throw;
  }
}

void Arena::give_up_unended() {
  const std::lock_guard<std::mutex> hold(unended_mutex_);
  for (const Copy& copy : unended_) index_.give_up(copy.entry, copy.generation);
  unended_.clear();
  has_unended_ = false;
}

void Arena::create(const std::string& arena_path, const std::string& slab_path, Config config) {
  if (config.ssd_slots) {
    ::unlink(slab_path.c_str());
    const int fd = ::open(slab_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) fail("cannot create SSD file " + slab_path, errno);
    const uint64_t bytes = kPage + config.ssd_slots * config.stride_bytes;
    int error = posix_fallocate(fd, 0, off_t(bytes));
    if (!error && !write_all(fd, config.identity, sizeof config.identity, 0)) error = errno;
    ::close(fd);
    if (error) {
      ::unlink(slab_path.c_str());
      fail("cannot reserve " + std::to_string(bytes) + " bytes for SSD file " + slab_path, error);
    }
  }
  try {
    SharedFile::create(arena_path, config);
  } catch (...) {
    if (config.ssd_slots) ::unlink(slab_path.c_str());
    throw;
  }
}

Arena::Arena(const std::string& arena_path, const std::string& slab_path, double deadline_s, bool populate)
    : file_(arena_path, populate), sections_(file_.config()), index_(file_), deadline_s_(deadline_s) {
  if (const Config& config = file_.config(); config.ssd_slots) {
    uint8_t identity[16];
    struct stat status;
    slab_ = ::open(slab_path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (slab_ < 0) fail("cannot open SSD file " + slab_path, errno);
    const uint64_t bytes = kPage + config.ssd_slots * config.stride_bytes;
    const bool ours = !fstat(slab_, &status) && status.st_uid == geteuid() && !(status.st_mode & 077) &&
                      uint64_t(status.st_size) == bytes && read_all(slab_, identity, sizeof identity, 0) &&
                      !std::memcmp(identity, config.identity, sizeof identity);
    if (!ours) {
      ::close(slab_);
      throw PoolFailure{"SSD file " + slab_path + " does not belong to arena " + arena_path};
    }
  }
  // Whatever the former holder of this client number left behind must be gone before this one claims anything; a new
  // arena gets its first free lists here.
  Locked locked(*this);
  index_.rebuild(Index::OwnClaims::kVoid);
}

Arena::~Arena() {
  if (slab_ >= 0) ::close(slab_);
}

void Arena::timed(Call call, double started_s) {
  const uint64_t ns = uint64_t((now_s() - started_s) * 1e9) | 1;
  const uint32_t bucket = std::min(64 - uint32_t(__builtin_clzll(ns)), kLatencyBuckets - 1);
  file_.header()->latency[call][bucket].fetch_add(1, std::memory_order_relaxed);
}

uint32_t Arena::lookup(const uint8_t* keys, size_t num) {
  const double started_s = now_s();
  uint32_t held = 0;
  {
    Locked locked(*this);
    while (held < num && index_.find(keys + held * kKeyBytes) != kNone) ++held;
  }
  timed(kCallLookup, started_s);
  return held;
}

std::vector<bool> Arena::put(const uint8_t* keys, const std::vector<Buffer>& blocks,
                             const std::vector<RequestId>& requests) {
  const double started_s = now_s();
  Deadline deadline = Deadline::after(deadline_s_);
  std::vector<bool> held(blocks.size(), false);
  struct Reserved {
    size_t block;
    uint32_t entry, slot;
    uint64_t generation, sum;
  };
  auto acknowledge = [&](size_t i, uint32_t e) {
    held[i] = requests.empty() || index_.pin(e, requests[requests.size() == 1 ? 0 : i]);
  };
  auto is_held = [&](size_t i) {  // already: equal keys name equal bytes
    const uint32_t e = index_.find(keys + i * kKeyBytes);
    if (e == kNone) return false;
    index_.touch(e);
    acknowledge(i, e);
    index_.count(kDuplicate);
    return true;
  };

  for (size_t next = 0; next < blocks.size();) {
    std::vector<Reserved> reserved;
    bool no_room = false;
    {
      Locked locked(*this);
      for (; next < blocks.size() && reserved.size() < kPutBatch; ++next) {
        const uint8_t* key = keys + next * kKeyBytes;
        if (index_.weights_version_dropped(key) || is_held(next)) continue;
        const uint32_t e = index_.reserve(key, uint32_t(blocks[next].bytes));
        if (e == kNone) {
          no_room = true;
          break;
        }
        reserved.push_back({next, e, index_.word(e).dram, index_.entry(e).generation, 0});
        may_crash(CrashPoint::kReserved);
      }
    }
    if (!reserved.empty()) deadline = Deadline::after(deadline_s_);  // it bounds waiting, not the size of a batch
    for (Reserved& one : reserved) {
      const Buffer& block = blocks[one.block];
      one.sum = copy_sum(file_.at(dram_offset(one.slot)), block.data, block.bytes);
    }
    may_crash(CrashPoint::kCopied);
    if (!reserved.empty()) {
      std::vector<Copy> copies;
      for (const Reserved& one : reserved) copies.push_back({one.entry, one.generation});
      Locked locked = lock_to_end(copies);
      for (const Reserved& one : reserved) {
        const uint8_t* key = keys + one.block * kKeyBytes;
        // By now its weights version may have ended, or another writer been faster.
        if (index_.weights_version_dropped(key) || is_held(one.block)) {
          index_.give_up(one.entry, one.generation);
        } else if (index_.publish(one.entry, one.generation, one.sum)) {
          acknowledge(one.block, one.entry);
          index_.count(kBytesPut, blocks[one.block].bytes);
        }
      }
    }
    may_crash(CrashPoint::kPublished);
    ring_if_low();
    if (!no_room) continue;
    const Room room = make_room(uint32_t(std::min<size_t>(blocks.size() - next, kSpillBatch)));
    if (room == Room::kFull || deadline.left_s() <= 0) break;
  }
  const uint64_t num_held = uint64_t(std::count(held.begin(), held.end(), true));
  index_.count(kPut, num_held);
  index_.count(kRefused, blocks.size() - num_held);
  timed(kCallPut, started_s);
  return held;
}

Arena::Found Arena::look(const uint8_t* key, bool touch) {
  Found found;
  found.entry = index_.find(key);
  if (found.entry == kNone) return found;
  const Entry& entry = index_.entry(found.entry);
  found.generation = entry.generation;
  found.word = entry.word.load();
  found.sum = entry.sum;
  found.length = entry.length;
  if (touch) index_.touch(found.entry);
  return found;
}

std::vector<bool> Arena::get(const uint8_t* keys, const std::vector<Buffer>& blocks, bool promote_ssd) {
  const double started_s = now_s();
  std::vector<bool> got(blocks.size(), false);
  for (size_t start = 0; start < blocks.size(); start += kGetBatch) {
    const size_t end = std::min(blocks.size(), start + kGetBatch);
    std::vector<Found> found;
    {
      Locked locked(*this);
      for (size_t i = start; i < end; ++i) found.push_back(look(keys + i * kKeyBytes, true));
    }
    for (size_t i = start; i < end; ++i) {
      bool from_ssd = false;
      got[i] = read_block(keys + i * kKeyBytes, found[i - start], blocks[i], &from_ssd);
      index_.count(!got[i] ? kMiss : from_ssd ? kHitSsd : kHitDram);
      if (got[i]) index_.count(kBytesGot, blocks[i].bytes);
      if (from_ssd && promote_ssd) promote_from(keys + i * kKeyBytes, blocks[i]);
    }
  }
  timed(kCallGet, started_s);
  return got;
}

bool Arena::read_block(const uint8_t* key, Found found, const Buffer& block, bool* from_ssd) {
  for (int tries = 0; tries < kReadTries; ++tries) {
    if (found.entry == kNone) return false;
    if (found.length != block.bytes) {
      index_.count(kWrongSize);
      return false;
    }
    Word at;
    uint64_t block_sum = 0;
    bool read = unpack(found.word, &at);
    const bool in_dram = at.dram < file_.config().dram_slots;
    if (read && in_dram) block_sum = copy_sum(block.data, file_.at(dram_offset(at.dram)), block.bytes);
    else if (read) read = read_summed(slab_, block.data, block.bytes, ssd_offset(at.ssd), &block_sum);
    may_crash(CrashPoint::kReading);
    if (read && block_sum == found.sum) {
      *from_ssd = !in_dram;
      return true;
    }
    Locked locked(*this);
    const Found now = look(key, false);
    if (now.entry == found.entry && now.generation == found.generation && now.word == found.word) {
      index_.count(read ? kCorrupt : kFailed);
      // One bad copy of two: the other may be good.
      const bool two = at.dram != kNoSlot && at.ssd != kNoSlot;
      if (two) index_.drop_copy(now.entry, in_dram ? Tier::kDram : Tier::kSsd);
      else index_.drop(now.entry);
    }
    found = look(key, false);
  }
  return false;  // the block moved each time it was read; rather compute it than wait
}

void Arena::promote_from(const uint8_t* key, const Buffer& block) {
  Index::Move move;
  {
    Locked locked(*this);
    const uint32_t e = index_.find(key);
    if (e == kNone || index_.entry(e).length != block.bytes || !index_.begin_promote(e, false, &move)) return;
  }
  const uint64_t block_sum = copy_sum(file_.at(dram_offset(move.to)), block.data, block.bytes);
  may_crash(CrashPoint::kPromoteCopied);
  Locked locked = lock_to_end({{move.entry, move.generation}});
  index_.end_promote(move, block_sum == index_.entry(move.entry).sum);
}

bool Arena::promote_one(const uint8_t* key) {
  Index::Move move;
  uint64_t sum_held = 0;
  for (bool begun = false, second = false; !begun; second = true) {
    if (second && spill(kSpillBatch, false) == 0) return false;  // a hint is not worth dropping a block
    {
      Locked locked(*this);
      const Found found = look(key, !second);
      Word at;
      if (found.entry == kNone || !unpack(found.word, &at) || at.dram != kNoSlot) return false;
      sum_held = found.sum;
      begun = index_.begin_promote(found.entry, true, &move);
    }
    if (!begun && second) return false;
  }
  uint64_t block_sum = 0;
  const bool read = read_summed(slab_, file_.at(dram_offset(move.to)), move.length, ssd_offset(move.from), &block_sum);
  may_crash(CrashPoint::kPromoteCopied);
  const bool good = read && block_sum == sum_held;
  Locked locked = lock_to_end({{move.entry, move.generation}});
  index_.end_promote(move, good);  // a bad SSD copy is left for `get` to find and count
  return good;
}

uint32_t Arena::promote(const uint8_t* keys, size_t num) {
  uint32_t promoted = 0;
  for (size_t i = 0; i < num; ++i) promoted += promote_one(keys + i * kKeyBytes);
  index_.count(kPrefetched, promoted);
  return promoted;
}

uint32_t Arena::spill(uint32_t wanted, bool may_evict) {
  std::vector<Index::Move> moves;
  uint32_t freed;
  {
    Locked locked(*this);
    freed = index_.begin_spill(wanted, may_evict, &moves);
  }
  may_crash(CrashPoint::kSpillClaimed);
  std::vector<bool> written;
  for (const Index::Move& move : moves)
    written.push_back(write_all(slab_, file_.at(dram_offset(move.from)), move.length, ssd_offset(move.to)));
  may_crash(CrashPoint::kSpillWritten);
  if (!moves.empty()) {
    std::vector<Copy> copies;
    for (const Index::Move& move : moves) copies.push_back({move.entry, move.generation});
    Locked locked = lock_to_end(copies);
    for (size_t i = 0; i < moves.size(); ++i) freed += index_.end_spill(moves[i], written[i]);
  }
  if (freed) SharedFile::ring(file_.header()->room_bell);
  return freed;
}

Arena::Room Arena::make_room(uint32_t wanted) {
  const uint32_t seen = file_.header()->room_bell.load();
  if (spill(wanted, true) > 0) return Room::kFreed;
  {
    Locked locked(*this);
    if (index_.reap() || index_.free_dram()) return Room::kFreed;
    if (!index_.claims_in_flight()) return Room::kFull;
  }
  SharedFile::wait(file_.header()->room_bell, seen, kRoomWait_s);
  return Room::kWait;
}

uint32_t Arena::low_water() const { return std::min(file_.config().dram_slots / 8, kSpillBatch * 2); }

void Arena::ring_if_low() {
  if (index_.free_dram() < low_water()) SharedFile::ring(file_.header()->keeper_bell);
}

bool Arena::keep(double wait_s) {
  if (!file_.become_keeper()) return false;
  std::atomic<uint32_t>& bell = file_.header()->keeper_bell;
  const uint32_t seen = bell.load();
  const bool work = index_.free_dram() < low_water() && !keeper_stuck_;
  if (!work && !stopping_) SharedFile::wait(bell, seen, wait_s);
  reap();
  keeper_stuck_ = false;
  while (!stopping_ && !keeper_stuck_ && index_.free_dram() < 2 * low_water())
    keeper_stuck_ = spill(kSpillBatch, false) == 0;  // then wait for the next bell rather than spin
  return true;
}

void Arena::stop_keeping() {
  stopping_ = true;
  SharedFile::ring(file_.header()->keeper_bell);
}

uint32_t Arena::pin(const RequestId& request, const uint8_t* keys, size_t num) {
  Locked locked(*this);
  for (uint32_t i = 0; i < num; ++i) {
    const uint32_t e = index_.find(keys + i * kKeyBytes);
    if (e == kNone || !index_.pin(e, request)) return i;
    index_.touch(e);
  }
  return uint32_t(num);
}

uint32_t Arena::unpin(const RequestId& request, bool drop_blocks) {
  Locked locked(*this);
  const uint32_t num = index_.unpin(request, drop_blocks);
  if (drop_blocks && num) SharedFile::ring(file_.header()->room_bell);
  return num;
}

uint32_t Arena::drop_weights_version(uint64_t weights_version) {
  Locked locked(*this);
  return index_.drop_weights_version(weights_version);
}

uint32_t Arena::reap() {
  Locked locked(*this);
  return index_.reap();
}

void Arena::rebuild() {
  Locked locked(*this);
  index_.rebuild();
}

Arena::Place Arena::locate(const uint8_t* key) {
  Locked locked(*this);
  const uint32_t e = index_.find(key);
  if (e == kNone) return {false, kNone, kNone, kNone, 0};
  const Word at = index_.word(e);
  return {true, e, at.dram, at.ssd, index_.entry(e).length};
}

std::vector<std::string> Arena::problems() {
  Locked locked(*this);
  return index_.problems();
}

}  // namespace seer::kvpool
