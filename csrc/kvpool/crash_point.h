// SPDX-License-Identifier: Apache-2.0
// Places where a test can have this process killed, as if by kill -9; one relaxed load each when unused.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace seer::kvpool {

enum class CrashPoint : uint32_t {
  kNever,
  kReserved,       // put: slots reserved, lock held
  kCopied,         // put: bytes copied, nothing published, no lock
  kPublishing,     // put: entry says kHeld, hash not yet updated, lock held
  kPublished,      // put: all published, not yet acknowledged, no lock
  kPinning,        // pin: record written, chains not yet, lock held
  kReading,        // get: bytes copied, not yet checked, no lock
  kSpillClaimed,   // spill: target claimed, no lock
  kSpillWritten,   // spill: bytes on SSD, entry still in DRAM, no lock
  kSpillMoved,     // spill: entry says SSD, DRAM slot not yet free, lock held
  kPromoteCopied,  // promote: bytes in DRAM, entry not yet changed, no lock
  kPromoteMoved,   // promote: entry says both, lists not yet changed, lock held
  kFreeing,        // free: one of several pins gone, lock held
  kDropping,       // drop_weights_version: one of several entries gone, lock held
  kRebuilding,     // rebuild: derived data cleared, lock held
  kCount
};

constexpr const char* kCrashPointNames[] = {"never",         "reserved",    "copied",         "publishing",
                                            "published",     "pinning",     "reading",        "spill_claimed",
                                            "spill_written", "spill_moved", "promote_copied", "promote_moved",
                                            "freeing",       "dropping",    "rebuilding"};
static_assert(sizeof(kCrashPointNames) / sizeof(char*) == size_t(CrashPoint::kCount));

inline std::atomic<uint32_t> crash_point{0};
inline std::atomic<uint32_t> crash_after{0};  // pass the point this many times first

inline void may_crash(CrashPoint here) {
  if (__builtin_expect(crash_point.load(std::memory_order_relaxed) != uint32_t(here), 1)) return;
  if (crash_after.fetch_sub(1) == 0) ::kill(::getpid(), SIGKILL);
}

}  // namespace seer::kvpool
