// SPDX-License-Identifier: Apache-2.0
// A 64-bit checksum of a block, and a copy that computes it on the way.
//
// Definition. Split the block, padded with zeros to a multiple of 64 bytes, into little-endian 64-bit words; word i
// goes to lane i mod 4; each lane is a CRC32C over its words, started from its own constant. The low half of the result
// is the CRC32C of (lane0|lane1<<32, lane2|lane3<<32, length); the high half is lane0 + 3 lane1 + 5 lane2 + 7 lane3.
// Four lanes because the CRC instruction has a latency of 3 cycles and a throughput of 1.
//
// Promises: every flip of up to 3 bits in one lane and every burst within one lane word changes the low half for sure
// (CRC32C); zeroed, swapped or shifted ranges change it with probability 1 - 2^-32 or better; all lanes together 2^-64.
//
// `copy_sum` loads each word once and both stores and sums that very value. That is what makes reading without a lock
// safe: when another process overwrites the source during the copy, the sum is of the bytes that arrived, never of others.
#pragma once
#include <cstddef>
#include <cstdint>

namespace seer::kvpool {

// CRC32C of one 64-bit word, chained through `crc`; no final inversion.
uint32_t crc32c_word(uint32_t crc, uint64_t word);

// Checksum of a block that arrives in pieces; every piece but the last is a multiple of 64 bytes.
class Summer {
 public:
  void add(const void* data, size_t bytes);
  uint64_t finish(uint64_t total_bytes) const;

 private:
  friend uint64_t copy_sum(void* target, const void* source, size_t bytes);
  uint64_t lanes_[4] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du, 0x27D4EB2Fu};
};

uint64_t sum(const void* data, size_t bytes);
uint64_t copy_sum(void* target, const void* source, size_t bytes);

// The same by table and plain stores, whatever the processor; tests compare the two.
uint64_t copy_sum_portable(void* target, const void* source, size_t bytes);

}  // namespace seer::kvpool
