// Vectors of floats as compilers offer them, for loops they would not see as vectors on their own.
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

}  // namespace seer::engine
