// SPDX-License-Identifier: Apache-2.0
// A flat array that grows without copying much and gives large memory back at once.
//
// Small arrays live on the heap. From 128 KiB on they are their own mapping: at first one that another array has left (see
// BlockCache), then grown by mremap: the kernel moves page table entries instead of bytes, untouched capacity costs no
// memory, and freeing a large group returns its pages to the system immediately (a heap would keep them). Fresh pages are
// asked for in steps, because the kernel hands out eight at once faster than one by one. Elsewhere than on Linux growth
// copies.
//
// Elements are addressed by index. References are valid only until the next `take`. kReadAhead elements past the last
// one may be read, whatever they hold.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>

#include "block_cache.h"
#endif

namespace seer::drafting {

template <class T>
class GrowingArray {
  static_assert(std::is_trivially_copyable<T>::value, "elements are moved as bytes");

 public:
  static constexpr std::size_t kReadAhead = 4;

  GrowingArray() = default;
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(const GrowingArray&) = delete;
  ~GrowingArray() { release(); }

  T& operator[](std::size_t index) { return data_[index]; }
  const T& operator[](std::size_t index) const { return data_[index]; }
  std::size_t size() const { return size_; }

  // Appends `count` elements of unspecified content and returns the index of the first.
  std::size_t take(std::size_t count) {
    if (size_ + count + kReadAhead > ready_) prepare(size_ + count + kReadAhead);
    const std::size_t first = size_;
    size_ += count;
    return first;
  }

  // Memory this array occupies: whole heap blocks, but only the touched part of a mapping.
  std::size_t bytes() const { return ready_ * sizeof(T); }

 private:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kFirstBytes = 8 * 1024;
  static constexpr std::size_t kMapFromBytes = 128 * 1024;
  static constexpr std::size_t kTouchBytes = 8 * kPage;

  void prepare(std::size_t needed) {
    if (needed > capacity_) grow(needed);
    if (needed > ready_) ready_ = mapped_bytes_ > 0 ? touch(needed) : capacity_;
  }

  void grow(std::size_t needed) {
    std::size_t bytes = kFirstBytes;
    // By fours where growing is copying.
    while (bytes < needed * sizeof(T)) bytes *= bytes < kMapFromBytes ? 4 : 2;
    T* moved = bytes < kMapFromBytes ? grow_on_heap(bytes) : grow_mapping(bytes);
    if (moved == nullptr) throw std::bad_alloc();
    data_ = moved;
    capacity_ = bytes / sizeof(T);
  }

  T* grow_on_heap(std::size_t bytes) { return static_cast<T*>(std::realloc(data_, bytes)); }

#if defined(__linux__)
  T* grow_mapping(std::size_t bytes) {
    // A block of a size that is kept is left behind for others: large groups would use them all up.
    if (mapped_bytes_ > BlockCache::kLargestBytes) {
      void* moved = mremap(data_, mapped_bytes_, bytes, MREMAP_MAYMOVE);
      if (moved == MAP_FAILED) return nullptr;
      mapped_bytes_ = bytes;
      return static_cast<T*>(moved);
    }
    void* kept = BlockCache::shared().take(bytes);
    void* fresh = kept != nullptr ? kept
                                  : mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) return nullptr;
    if (size_ > 0) std::memcpy(fresh, data_, size_ * sizeof(T));
    release();
    mapped_bytes_ = bytes;
    if (kept != nullptr) ready_ = bytes / sizeof(T);
    return static_cast<T*>(fresh);
  }

  // Has pages put behind the first `needed` elements and a few more; returns the elements that have them.
  std::size_t touch(std::size_t needed) {
    const std::size_t from = ready_ * sizeof(T) / kPage * kPage;
    const std::size_t to = std::min((needed * sizeof(T) + kTouchBytes - 1) / kTouchBytes * kTouchBytes, mapped_bytes_);
#if defined(MADV_POPULATE_WRITE)
    // Where the kernel does not know it (before Linux 5.14), pages come one by one as they are written.
    madvise(reinterpret_cast<char*>(data_) + from, to - from, MADV_POPULATE_WRITE);
#else
    static_cast<void>(from);
#endif
    return to / sizeof(T);
  }

  void release() {
    if (mapped_bytes_ == 0) {
      std::free(data_);
    } else if (!BlockCache::shared().give(data_, mapped_bytes_)) {
      munmap(data_, mapped_bytes_);
    }
  }
#else
  T* grow_mapping(std::size_t bytes) { return grow_on_heap(bytes); }
  std::size_t touch(std::size_t) { return capacity_; }
  void release() { std::free(data_); }
#endif

  T* data_ = nullptr;
  std::size_t size_ = 0;          // elements handed out
  std::size_t ready_ = 0;         // elements with memory behind them
  std::size_t capacity_ = 0;      // elements there is room for
  std::size_t mapped_bytes_ = 0;  // length of the mapping, 0 while on the heap
};

}  // namespace seer::drafting
