// SPDX-License-Identifier: Apache-2.0
// What the pool's tests share: a folder that goes with the test, keys, and blocks whose bytes follow from their names.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "kvpool/arena.h"
#include "testing/check.h"

namespace seer::kvpool {

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "seer-kvpool-XXXXXX").string();
    CHECK(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;

  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::string arena() const { return file("arena"); }
  std::string slab() const { return file("slab"); }

 private:
  std::string path_;
};

constexpr uint64_t kBlockBytes = 5000;  // not a multiple of anything
constexpr double kDeadline_s = 30;

inline Config test_config(uint32_t dram_slots, uint32_t ssd_slots, uint32_t num_pins = 64) {
  Config config = sized_config(kBlockBytes, dram_slots, ssd_slots, num_pins);
  std::memcpy(config.identity, "0123456789abcdef", sizeof config.identity);
  std::strcpy(config.run, "test");
  return config;
}

// Names are small numbers; a block's key starts with its weights version.
struct Name {
  uint64_t weights_version;
  uint32_t number;
};

inline std::vector<uint8_t> key_of(const Name& name) {
  std::vector<uint8_t> key(kKeyBytes, uint8_t(name.number));
  std::memcpy(key.data(), &name.weights_version, sizeof name.weights_version);
  return key;
}

inline std::vector<uint8_t> keys_of(const std::vector<Name>& names) {
  std::vector<uint8_t> keys;
  for (const Name& name : names) {
    const std::vector<uint8_t> key = key_of(name);
    keys.insert(keys.end(), key.begin(), key.end());
  }
  return keys;
}

inline std::vector<uint8_t> block_of(const Name& name) {
  std::mt19937 rng(name.number * 1000 + uint32_t(name.weights_version));
  std::vector<uint8_t> block(kBlockBytes - 64 * (name.number % 3));
  for (uint8_t& byte : block) byte = uint8_t(rng());
  return block;
}

inline std::vector<bool> put(Arena& arena, const std::vector<Name>& names, const std::vector<RequestId>& requests) {
  std::vector<std::vector<uint8_t>> blocks;
  std::vector<Buffer> buffers;
  for (const Name& name : names) blocks.push_back(block_of(name));
  for (std::vector<uint8_t>& block : blocks) buffers.push_back({block.data(), block.size()});
  return arena.put(keys_of(names).data(), buffers, requests);
}

// Which blocks came; those that came have the right bytes.
inline std::vector<bool> get(Arena& arena, const std::vector<Name>& names, bool promote) {
  std::vector<std::vector<uint8_t>> expected, blocks;
  std::vector<Buffer> buffers;
  for (const Name& name : names) expected.push_back(block_of(name)), blocks.emplace_back(expected.back().size());
  for (std::vector<uint8_t>& block : blocks) buffers.push_back({block.data(), block.size()});
  const std::vector<bool> got = arena.get(keys_of(names).data(), buffers, promote);
  for (size_t i = 0; i < names.size(); ++i) CHECK(!got[i] || blocks[i] == expected[i]);
  return got;
}

inline bool is_sound(Arena& arena) {
  const std::vector<std::string> problems = arena.problems();
  for (const std::string& problem : problems) std::fprintf(stderr, "%s\n", problem.c_str());
  return problems.empty();
}

inline uint64_t counter(Arena& arena, Counter which) { return arena.file().header()->counters[which].load(); }

// Whether the call fails with a message that has these words.
template <class Call>
bool refuses(Call call, const std::string& words) {
  try {
    call();
  } catch (const PoolFailure& failure) {
    if (failure.message.find(words) != std::string::npos) return true;
    std::fprintf(stderr, "the message was \"%s\", without \"%s\"\n", failure.message.c_str(), words.c_str());
  }
  return false;
}

}  // namespace seer::kvpool
