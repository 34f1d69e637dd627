// SPDX-License-Identifier: Apache-2.0
// The checksum against its definition, bit by bit; and what its promises rest on.
#include "kvpool/checksum.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "kvpool/layout.h"
#include "testing/check.h"

using namespace seer::kvpool;

namespace {

uint32_t slow_crc(uint32_t crc, uint64_t word) {
  for (int bit = 0; bit < 64; ++bit, word >>= 1) {
    const bool carry = (crc ^ word) & 1;
    crc = crc >> 1 ^ (carry ? 0x82F63B78u : 0);
  }
  return crc;
}

uint64_t slow_sum(const std::vector<uint8_t>& block) {
  std::vector<uint8_t> padded = block;
  padded.resize((block.size() + 63) / 64 * 64);
  uint32_t lane[4] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du, 0x27D4EB2Fu};
  for (size_t i = 0; i < padded.size() / 8; ++i) {
    uint64_t word = 0;
    for (int byte = 0; byte < 8; ++byte) word |= uint64_t{padded[8 * i + size_t(byte)]} << 8 * byte;
    lane[i % 4] = slow_crc(lane[i % 4], word);
  }
  uint32_t low = slow_crc(0xFFFFFFFFu, lane[0] | uint64_t{lane[1]} << 32);
  low = slow_crc(slow_crc(low, lane[2] | uint64_t{lane[3]} << 32), block.size());
  return uint64_t{lane[0] + 3 * lane[1] + 5 * lane[2] + 7 * lane[3]} << 32 | low;
}

std::vector<uint8_t> random_block(std::mt19937_64& rng, size_t bytes) {
  std::vector<uint8_t> block(bytes);
  for (uint8_t& byte : block) byte = uint8_t(rng());
  return block;
}

void words_follow_the_published_vectors() {
  // RFC 3720, B.4: 32 bytes of zeros, and of ones.
  uint32_t zeros = ~0u, ones = ~0u;
  for (int i = 0; i < 4; ++i) zeros = crc32c_word(zeros, 0), ones = crc32c_word(ones, ~uint64_t{0});
  CHECK(~zeros == 0x8A9136AAu);
  CHECK(~ones == 0x62A8AB43u);
}

void every_way_gives_the_sum_of_the_definition(std::mt19937_64& rng, size_t bytes) {
  const std::vector<uint8_t> block = random_block(rng, bytes);
  const uint64_t expected = slow_sum(block);
  CHECK(sum(block.data(), bytes) == expected);
  CHECK(copy_sum_portable(nullptr, block.data(), bytes) == expected);

  // From and to any address; nothing beside the target is written.
  const size_t from = rng() % 16, to = rng() % 16;
  std::vector<uint8_t> source(from + bytes), target(to + bytes + 8, 0xEE);
  std::copy(block.begin(), block.end(), source.begin() + ptrdiff_t(from));
  for (const auto copy : {copy_sum, copy_sum_portable}) {
    std::fill(target.begin(), target.end(), uint8_t{0xEE});
    CHECK(copy(target.data() + to, source.data() + from, bytes) == expected);
    CHECK(std::equal(block.begin(), block.end(), target.begin() + ptrdiff_t(to)));
    CHECK(std::count(target.begin(), target.begin() + ptrdiff_t(to), 0xEE) == ptrdiff_t(to));
    CHECK(std::count(target.end() - 8, target.end(), 0xEE) == 8);
  }

  Summer summer;
  for (size_t done = 0; done < bytes;) {
    const size_t piece = std::min(bytes - done, 64 * (1 + rng() % 40));
    summer.add(block.data() + done, piece);
    done += piece;
  }
  CHECK(summer.finish(bytes) == expected);
}

void few_flips_in_a_lane_are_always_seen(std::mt19937_64& rng) {
  std::vector<uint8_t> block = random_block(rng, 1024);
  const uint32_t before = uint32_t(sum(block.data(), block.size()));
  for (int round = 0; round < 500; ++round) {
    const uint64_t lane = rng() % 4;
    std::vector<uint64_t> bits;
    while (bits.size() < 1 + size_t(round) % 3) {
      const uint64_t bit = (rng() % 32 * 4 + lane) * 64 + rng() % 64;
      if (std::find(bits.begin(), bits.end(), bit) == bits.end()) bits.push_back(bit);
    }
    for (const uint64_t bit : bits) block[bit / 8] ^= uint8_t(1u << bit % 8);
    CHECK(uint32_t(sum(block.data(), block.size())) != before);
    for (const uint64_t bit : bits) block[bit / 8] ^= uint8_t(1u << bit % 8);
  }
  CHECK(uint32_t(sum(block.data(), block.size())) == before);
  CHECK(uint32_t(sum(block.data(), 1023)) != before);
}

void packed_words_and_claims_come_back_and_notice_a_flip(std::mt19937_64& rng) {
  for (int round = 0; round < 200; ++round) {
    const Word word{State(rng() % 4), uint32_t(rng()) & 0xFFFFFF, uint32_t(rng()) & 0xFFFFFF};
    const Claim claim{uint32_t(rng() % kMaxClients), Tier(rng() % 3), uint32_t(rng()) & 0xFFFFFF};
    Word seen_word;
    Claim seen_claim;
    CHECK(unpack(pack(word), &seen_word));
    CHECK(seen_word.state == word.state && seen_word.dram == word.dram && seen_word.ssd == word.ssd);
    CHECK(unpack(pack(claim), &seen_claim));
    CHECK(seen_claim.client == claim.client && seen_claim.tier == claim.tier && seen_claim.slot == claim.slot);
    for (int bit = 0; bit < 64; ++bit) {
      CHECK(!unpack(pack(word) ^ uint64_t{1} << bit, &seen_word));
      CHECK(!unpack(pack(claim) ^ uint64_t{1} << bit, &seen_claim));
    }
  }
}

}  // namespace

int main() {
  std::mt19937_64 rng(seer::testing::seed());
  words_follow_the_published_vectors();
  for (size_t bytes = 0; bytes < 300; ++bytes) every_way_gives_the_sum_of_the_definition(rng, bytes);
  for (int round = 0; round < 20; ++round) every_way_gives_the_sum_of_the_definition(rng, rng() % 20000);
  // Around the size from which stores go past the caches.
  for (const size_t bytes : {(128u << 10) - 1, 128u << 10, (128u << 10) + 65})
    every_way_gives_the_sum_of_the_definition(rng, bytes);
  few_flips_in_a_lane_are_always_seen(rng);
  packed_words_and_claims_come_back_and_notice_a_flip(rng);
  return seer::testing::passed("checksum");
}
