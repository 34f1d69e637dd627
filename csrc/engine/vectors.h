// SPDX-License-Identifier: Apache-2.0
// Vectors of floats as compilers offer them, for loops they would not see as vectors on their own, and asking memory
// ahead of them.
#pragma once

#define SEER_INLINE static inline __attribute__((always_inline))
// Whether functions can be compiled for several levels of x86 and chosen when the module is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SEER_X86_LEVELS
#endif

namespace seer::engine {

// W floats that need not be aligned.
template <int W>
struct Floats {
  typedef float Type __attribute__((vector_size(W * sizeof(float)), aligned(sizeof(float)), may_alias));
};
template <int W>
using Vector = typename Floats<W>::Type;

template <int W>
SEER_INLINE Vector<W> load(const float* from) {
  return *reinterpret_cast<const Vector<W>*>(from);
}

template <int W>
SEER_INLINE void store(float* to, Vector<W> value) {
  *reinterpret_cast<Vector<W>*>(to) = value;
}

// Have the line at an address fetched into the second-level cache: the first level's queue is too short to keep memory
// busy (attention of SmolLM2, 32 rows of 192 positions on an EPYC core: 28 ms a step without, 25 into L1, 12.5 into L2).
SEER_INLINE void ask_ahead(const float* ahead) { __builtin_prefetch(ahead, 0, 2); }

}  // namespace seer::engine
