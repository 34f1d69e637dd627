// SPDX-License-Identifier: Apache-2.0
// The mapped file all clients share: creating, attaching, the lock, and who is alive.
//
// Liveness does not go by pid (processes in different containers share the file): client i holds an open-file-description
// lock on byte kClientBase + i, which the kernel releases when the process is gone, however it went.
#pragma once
#include <string>
#include <vector>

#include "layout.h"

namespace seer::kvpool {

struct PoolFailure {  // becomes seer.errors.PoolError in Python
  std::string message;
};

struct Deadline {
  timespec at;  // CLOCK_MONOTONIC
  static Deadline after(double seconds);
  double left_s() const;
};

double now_s();

class SharedFile {
 public:
  // Makes the file complete under `path`.tmp and then renames it, so a file under its own name is always complete.
  static void create(const std::string& path, Config config);
  // Reads only the configuration and who is attached; throws PoolFailure with the reason when it is not usable.
  struct Probe {
    Config config;
    std::vector<uint32_t> live_pids;
  };
  static Probe probe(const std::string& path);

  SharedFile(const std::string& path, bool populate);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;

  Header* header() const { return reinterpret_cast<Header*>(base_); }
  uint8_t* at(uint64_t offset) const { return base_ + offset; }
  const Config& config() const { return config_; }  // this process's own copy, checked once

  uint32_t client() const { return client_; }
  bool client_alive(uint32_t client) const;

  // False when the last owner died inside: the caller must rebuild and then call `lock_is_consistent`.
  bool lock(const Deadline& deadline);
  void lock_is_consistent();
  void unlock();

  // Wait until `bell` differs from `seen` or the time is over; ring wakes every waiter.
  static void wait(std::atomic<uint32_t>& bell, uint32_t seen, double seconds);
  static void ring(std::atomic<uint32_t>& bell);

  // Only one process keeps house at a time; true when it is this one.
  bool become_keeper();
  void check_process() const;  // throws in a forked child

 private:
  int fd_ = -1;
  int pid_ = 0;
  uint8_t* base_ = nullptr;
  Config config_{};
  uint32_t client_ = kNone;
};

}  // namespace seer::kvpool
