// A flat array that grows without copying and gives its memory back at once.
//
// Small arrays live on the heap. From 64 KiB on they are their own mapping, grown by mremap: the kernel moves page
// table entries instead of bytes, untouched capacity costs no memory, and freeing a group returns its pages to the
// system immediately (a heap would keep them). Elsewhere than on Linux growth copies.
//
// Elements are addressed by index. References are valid only until the next `take`.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace seer::drafting {

template <class T>
class GrowingArray {
  static_assert(std::is_trivially_copyable<T>::value, "elements are moved as bytes");

 public:
  GrowingArray() = default;
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(const GrowingArray&) = delete;
  ~GrowingArray() { release(); }

  T& operator[](std::size_t index) { return data_[index]; }
  const T& operator[](std::size_t index) const { return data_[index]; }
  std::size_t size() const { return size_; }

  // Appends `count` elements of unspecified content and returns the index of the first.
  std::size_t take(std::size_t count) {
    if (size_ + count > capacity_) grow(size_ + count);
    const std::size_t first = size_;
    size_ += count;
    return first;
  }

  // Memory this array occupies: whole heap blocks, but only the touched part of a mapping.
  std::size_t bytes() const {
    if (!mapped_) return capacity_ * sizeof(T);
    return (size_ * sizeof(T) + kPage - 1) / kPage * kPage;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kMapFromBytes = 64 * 1024;
  static constexpr std::size_t kFirstBytes = 512;

  void grow(std::size_t needed) {
    std::size_t bytes = capacity_ ? capacity_ * sizeof(T) * 2 : kFirstBytes;
    while (bytes < needed * sizeof(T)) bytes *= 2;
    T* moved = bytes < kMapFromBytes ? grow_on_heap(bytes) : grow_mapping(bytes);
    if (moved == nullptr) throw std::bad_alloc();
    data_ = moved;
    capacity_ = bytes / sizeof(T);
    mapped_bytes_ = mapped_ ? bytes : 0;
  }

  T* grow_on_heap(std::size_t bytes) { return static_cast<T*>(std::realloc(data_, bytes)); }

#if defined(__linux__)
  T* grow_mapping(std::size_t bytes) {
    if (mapped_) {
      void* moved = mremap(data_, mapped_bytes_, bytes, MREMAP_MAYMOVE);
      return moved == MAP_FAILED ? nullptr : static_cast<T*>(moved);
    }
    void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) return nullptr;
    if (size_ > 0) std::memcpy(fresh, data_, size_ * sizeof(T));
    std::free(data_);
    mapped_ = true;
    return static_cast<T*>(fresh);
  }

  void release() {
    if (mapped_) {
      munmap(data_, mapped_bytes_);
    } else {
      std::free(data_);
    }
  }
#else
  T* grow_mapping(std::size_t bytes) { return grow_on_heap(bytes); }
  void release() { std::free(data_); }
#endif

  T* data_ = nullptr;
  std::size_t size_ = 0;          // elements handed out
  std::size_t capacity_ = 0;      // elements there is room for
  std::size_t mapped_bytes_ = 0;  // length of the mapping, 0 while on the heap
  bool mapped_ = false;
};

}  // namespace seer::drafting
