// SPDX-License-Identifier: Apache-2.0
#include "checksum.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace seer::kvpool {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // CRC32C, reflected
// Below this a copy fits the caches and is likely used from there; above it, streaming stores save reading the target
// line first: measured 18 against 13.4 GiB/s for memcpy at 1 MiB on an EPYC (Zen 4) guest.
constexpr size_t kStreamBytes = 128 << 10;

struct Tables {
  uint32_t at[8][256];
  constexpr Tables() : at{} {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
      at[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; ++i)
      for (int k = 1; k < 8; ++k) at[k][i] = (at[k - 1][i] >> 8) ^ at[0][at[k - 1][i] & 255];
  }
};
constexpr Tables kTables;

uint32_t crc_table(uint32_t crc, uint64_t word) {
  word ^= crc;
  uint32_t next = 0;
  for (int k = 0; k < 8; ++k) next ^= kTables.at[7 - k][(word >> (8 * k)) & 255];
  return next;
}

// Hides the value from the optimiser, so that it is loaded exactly once (see the header).
inline void loaded_once(uint64_t& value) { asm volatile("" : "+r"(value)); }

inline uint64_t load(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, 8);
  loaded_once(value);
  return value;
}

void copy_lanes_portable(uint8_t* target, const uint8_t* source, size_t bytes, uint64_t* lanes) {
  for (size_t i = 0; i < bytes; i += 32) {
    for (int lane = 0; lane < 4; ++lane) {
      const uint64_t word = load(source + i + 8 * lane);
      lanes[lane] = crc_table(static_cast<uint32_t>(lanes[lane]), word);
      if (target) std::memcpy(target + i + 8 * lane, &word, 8);
    }
  }
}

#if defined(__x86_64__)
enum class Store { kNone, kPlain, kStream };

template <Store store>
__attribute__((target("sse4.2"))) void copy_lanes_sse(uint8_t* target, const uint8_t* source, size_t bytes,
                                                      uint64_t* lanes) {
  uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
  for (size_t i = 0; i < bytes; i += 64) {
    const uint8_t* from = source + i;
    const uint64_t w[8] = {load(from),      load(from + 8),  load(from + 16), load(from + 24),
                           load(from + 32), load(from + 40), load(from + 48), load(from + 56)};
    a = _mm_crc32_u64(_mm_crc32_u64(a, w[0]), w[4]);
    b = _mm_crc32_u64(_mm_crc32_u64(b, w[1]), w[5]);
    c = _mm_crc32_u64(_mm_crc32_u64(c, w[2]), w[6]);
    d = _mm_crc32_u64(_mm_crc32_u64(d, w[3]), w[7]);
    if constexpr (store == Store::kStream)
      for (int k = 0; k < 8; ++k)
        _mm_stream_si64(reinterpret_cast<long long*>(target + i) + k, static_cast<long long>(w[k]));
    if constexpr (store == Store::kPlain) std::memcpy(target + i, w, 64);
  }
  if constexpr (store == Store::kStream) _mm_sfence();
  lanes[0] = a, lanes[1] = b, lanes[2] = c, lanes[3] = d;
}

__attribute__((target("sse4.2"))) uint32_t crc_sse(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}

const bool kHasCrc = __builtin_cpu_supports("sse4.2");
#endif

// `bytes` is a multiple of 64; a null target only sums.
void copy_lanes(uint8_t* target, const uint8_t* source, size_t bytes, uint64_t* lanes) {
#if defined(__x86_64__)
  if (kHasCrc) {
    if (!target) return copy_lanes_sse<Store::kNone>(target, source, bytes, lanes);
    const bool stream = bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(target) % 8 == 0;
    return stream ? copy_lanes_sse<Store::kStream>(target, source, bytes, lanes)
                  : copy_lanes_sse<Store::kPlain>(target, source, bytes, lanes);
  }
#endif
  copy_lanes_portable(target, source, bytes, lanes);
}

using LaneCopy = void (*)(uint8_t*, const uint8_t*, size_t, uint64_t*);

void copy_whole(LaneCopy copy, void* target, const void* source, size_t bytes, uint64_t* lanes) {
  auto* to = static_cast<uint8_t*>(target);
  const auto* from = static_cast<const uint8_t*>(source);
  const size_t whole = bytes & ~size_t{63};
  copy(to, from, whole, lanes);
  if (const size_t rest = bytes - whole) {
    uint8_t padded[64] = {};
    std::memcpy(padded, from + whole, rest);  // one read of shared bytes, then only the private copy is used
    asm volatile("" ::: "memory");
    copy(nullptr, padded, 64, lanes);
    if (to) std::memcpy(to + whole, padded, rest);
  }
}

}  // namespace

uint32_t crc32c_word(uint32_t crc, uint64_t word) {
#if defined(__x86_64__)
  if (kHasCrc) return crc_sse(crc, word);
#endif
  return crc_table(crc, word);
}

void Summer::add(const void* data, size_t bytes) { copy_whole(copy_lanes, nullptr, data, bytes, lanes_); }

uint64_t Summer::finish(uint64_t total_bytes) const {
  uint32_t low = crc32c_word(0xFFFFFFFFu, lanes_[0] | lanes_[1] << 32);
  low = crc32c_word(crc32c_word(low, lanes_[2] | lanes_[3] << 32), total_bytes);
  const uint32_t high = static_cast<uint32_t>(lanes_[0] + 3 * lanes_[1] + 5 * lanes_[2] + 7 * lanes_[3]);
  return uint64_t{high} << 32 | low;
}

uint64_t sum(const void* data, size_t bytes) {
  Summer summer;
  summer.add(data, bytes);
  return summer.finish(bytes);
}

uint64_t copy_sum(void* target, const void* source, size_t bytes) {
  Summer summer;
  copy_whole(copy_lanes, target, source, bytes, summer.lanes_);
  return summer.finish(bytes);
}

uint64_t copy_sum_portable(void* target, const void* source, size_t bytes) {
  uint64_t lanes[4];
  Summer summer;
  std::memcpy(lanes, &summer, sizeof lanes);
  copy_whole(copy_lanes_portable, target, source, bytes, lanes);
  std::memcpy(static_cast<void*>(&summer), lanes, sizeof lanes);
  return summer.finish(bytes);
}

}  // namespace seer::kvpool
