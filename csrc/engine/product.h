// SPDX-License-Identifier: Apache-2.0
// The embedded engine's matrix products on a CPU, in fp32.
//
// Purpose: decoding multiplies a few rows with many weights. The weights must stream from memory at its full speed while
// the arithmetic goes on; a library's product, made for many rows, does one and then the other (SmolLM2 on one EPYC core,
// all products of a step, oneDNN's packed form against this: 29 and 17 ms for 1 to 4 rows, 39 and 20 for 8, 94 and 79
// for 32, where the core can do no better).
//
// A matrix [outer][inner] is stored in panels: kPanel consecutive outputs as [inner][kPanel], one panel after another,
// the last one filled up with zeros.
//
// Invariants
//   1. An output is bias + the sum over `inner` in order, in one accumulator, each term fused: the same bits whatever
//      the number of rows, the row's place among them, and the number of threads. (Hardware that cannot fuse rounds
//      twice, everywhere.)
//   2. Memory beyond the arguments is never read; the hardware may be asked to fetch some, which is harmless.
#pragma once

#include <cstdint>
#include <vector>

namespace seer::engine {

constexpr int64_t kPanel = 48;  // three vectors of 16, six of 8, twelve of 4

// The number of panels of a matrix with `outer` outputs.
inline int64_t num_panels(int64_t outer) { return (outer + kPanel - 1) / kPanel; }

// Fill panels [num_panels(outer)][inner][kPanel] from weight [outer][inner].
void pack(const float* weight, float* panels, int64_t inner, int64_t outer);

struct Product {
  const float* x;       // [rows][inner]
  const float* panels;  // as `pack` leaves them
  const float* bias;    // [outer], or null for none
  float* out;           // [rows][outer]
  int64_t rows, inner, outer;
};

// Compute it, on as many threads as the calling thread last asked for.
void multiply(const Product& product);

// Compute with vectors of `width` floats, of `widths`; for tests of one against the other.
void multiply(const Product& product, int width);

// The widths this processor has, the best first.
std::vector<int> widths();

// How many threads the calling thread's products use from now on, itself included.
void use_threads(int count);

}  // namespace seer::engine
