// SPDX-License-Identifier: Apache-2.0
// Threads that one thread lets share its work, part by part.
//
// Invariants
//   1. `run` returns when every part is done; parts run once each, part 0 on the caller's thread.
//   2. One thread at a time calls `run`: a crew belongs to the thread that made it.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace seer::engine {

class Crew {
 public:
  explicit Crew(int threads) {
    for (int part = 1; part < threads; ++part) helpers_.emplace_back([this, part] { help(part); });
  }

  ~Crew() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      ended_ = true;
    }
    begin_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  int size() const { return static_cast<int>(helpers_.size()) + 1; }

  // work(0) .. work(size() - 1), at once.
  void run(const std::function<void(int)>& work) {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      work_ = &work;
      open_ = helpers_.size();
      ++round_;
    }
    begin_.notify_all();
    work(0);
    std::unique_lock<std::mutex> hold(mutex_);
    done_.wait(hold, [this] { return open_ == 0; });
  }

 private:
  void help(int part) {
    std::unique_lock<std::mutex> hold(mutex_);
    for (uint64_t seen = 0;; seen = round_) {
      begin_.wait(hold, [&] { return ended_ || round_ != seen; });
      if (ended_) return;
      const std::function<void(int)>& work = *work_;
      hold.unlock();
      work(part);
      hold.lock();
      if (--open_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable begin_, done_;
  const std::function<void(int)>* work_ = nullptr;
  size_t open_ = 0;
  uint64_t round_ = 0;
  bool ended_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace seer::engine
