// SPDX-License-Identifier: Apache-2.0
// Python names for kernels.h and product.h. Arrays cross as addresses: the one caller (engine/local/cpu_ops.py) makes
// them from tensors whose type and contiguity it has checked, and a call per layer cannot afford more.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "kernels.h"
#include "product.h"

namespace nb = nanobind;
using seer::engine::Kernels;
using Address = uintptr_t;

namespace {

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "CPU kernels of the embedded engine; see csrc/engine/kernels.h.";

  nb::class_<Kernels>(m, "Kernels")
      .def(
          "__init__",
          [](Kernels* self, int64_t num_layers, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
             int64_t block_size, Address cache) {
            new (self) Kernels({num_layers, num_heads, num_kv_heads, head_dim, block_size}, at<float>(cache));
          },
          nb::kw_only(), nb::arg("num_layers"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
          nb::arg("block_size"), nb::arg("cache"))
      .def(
          "begin",
          [](Kernels& self, int64_t num_batched_tokens, int64_t num_segments, Address segment_rows,
             Address segment_seq_slots, Address tables, int64_t table_width, Address num_visible, Address slots,
             Address path_start, Address path_slots, Address cosine, Address sine) {
            self.begin({num_batched_tokens, num_segments, at<const int32_t>(segment_rows),
                        at<const int32_t>(segment_seq_slots), at<const int32_t>(tables), table_width,
                        at<const int32_t>(num_visible), at<const int64_t>(slots), at<const int32_t>(path_start),
                        at<const int64_t>(path_slots), at<const float>(cosine), at<const float>(sine)});
          },
          nb::kw_only(), nb::arg("num_batched_tokens"), nb::arg("num_segments"), nb::arg("segment_rows"),
          nb::arg("segment_seq_slots"), nb::arg("tables"), nb::arg("table_width"), nb::arg("num_visible"),
          nb::arg("slots"), nb::arg("path_start"), nb::arg("path_slots"), nb::arg("cosine"), nb::arg("sine"))
      .def("rotate_store",
           [](Kernels& self, int64_t layer, Address qkv, Address q_norm, Address k_norm, float eps) {
             nb::gil_scoped_release unlocked;
             self.rotate_store(layer, at<float>(qkv), at<const float>(q_norm), at<const float>(k_norm), eps);
           })
      .def("attend",
           [](Kernels& self, int64_t layer, Address qkv, Address out) {
             nb::gil_scoped_release unlocked;
             self.attend(layer, at<const float>(qkv), at<float>(out));
           })
      .def("move", [](Kernels& self, Address from, Address to, int64_t count) {
        nb::gil_scoped_release unlocked;
        self.move(at<const int64_t>(from), at<const int64_t>(to), count);
      });

  m.def("add_rms_norm",
        [](Address x, Address residual, Address weight, Address out, int64_t rows, int64_t dim, float eps) {
          nb::gil_scoped_release unlocked;
          seer::engine::add_rms_norm(at<const float>(x), at<float>(residual), at<const float>(weight), at<float>(out),
                                     rows, dim, eps);
        });
  m.def("silu_mul", [](Address gate_up, Address out, int64_t rows, int64_t inner) {
    nb::gil_scoped_release unlocked;
    seer::engine::silu_mul(at<const float>(gate_up), at<float>(out), rows, inner);
  });
  m.attr("PANEL") = seer::engine::kPanel;
  m.def("pack", [](Address weight, Address panels, int64_t inner, int64_t outer) {
    nb::gil_scoped_release unlocked;
    seer::engine::pack(at<const float>(weight), at<float>(panels), inner, outer);
  });
  m.def(
      "multiply",
      [](Address x, Address panels, Address bias, Address out, int64_t rows, int64_t inner, int64_t outer, int width) {
        nb::gil_scoped_release unlocked;
        const seer::engine::Product product{
            at<const float>(x), at<const float>(panels), at<const float>(bias), at<float>(out), rows, inner, outer};
        return width == 0 ? seer::engine::multiply(product) : seer::engine::multiply(product, width);
      },
      nb::arg("x"), nb::arg("panels"), nb::arg("bias"), nb::arg("out"), nb::arg("rows"), nb::arg("inner"),
      nb::arg("outer"), nb::arg("width") = 0);
  m.def("widths", &seer::engine::widths);
  m.def("use_threads", &seer::engine::use_threads);
  m.def("sample", [](Address raw, Address processed, int64_t vocab, uint64_t seed, uint64_t position, bool greedy) {
    seer::engine::Sampled sampled;
    {
      nb::gil_scoped_release unlocked;
      sampled = seer::engine::sample(at<const float>(raw), at<const float>(processed), vocab, seed, position, greedy);
    }
    return std::make_tuple(sampled.token, sampled.logprob, sampled.raw_logprob, sampled.margin);
  });
  m.def("gumbel", [](uint64_t seed, uint64_t position, Address out, int64_t vocab) {
    seer::engine::gumbel(seed, position, at<float>(out), vocab);
  });
}
