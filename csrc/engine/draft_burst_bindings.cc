// SPDX-License-Identifier: Apache-2.0
// Python face of draft_burst.h. Shapes are checked on every call: a call serves a whole step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>

#include "draft_burst.h"

namespace nb = nanobind;
using namespace seer::engine;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<T, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

void check_seq_slots(const DraftBurst& burst, const Table<const std::int32_t>& tables) {
  for (std::int64_t i = 0; i < burst.size(); ++i) {
    const std::int32_t seq_slot = burst.chunk(i).seq_slot;
    require(seq_slot >= 0 && static_cast<std::size_t>(seq_slot) < tables.shape(0),
            "a chunk's seq_slot is outside the tables");
  }
}

bool lay_out(DraftBurst& burst, Table<const std::int32_t> tokens, Table<const std::int32_t> parents,
             Array<const std::int32_t> counts, Table<const std::int32_t> tables, std::int64_t num_chunks,
             std::int64_t tokens_per_chunk, std::int64_t max_moves, Array<std::int32_t> inputs) {
  require(static_cast<std::int64_t>(counts.size()) == burst.size(), "one tree per chunk");
  require(tokens.shape(0) == counts.size() && parents.shape(0) == counts.size() && tokens.shape(1) == parents.shape(1),
          "tokens and parents have a row for each chunk");
  require(num_chunks >= burst.num_live(), "fewer places than chunks");
  const std::int64_t most =
      std::min<std::int64_t>({static_cast<std::int64_t>(tokens.shape(1)), tokens_per_chunk - 1, kMaxNodes});
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const std::int32_t count = counts.data()[i];
    require(count >= 0 && count <= most, "a tree has more nodes than there are rows for");
    require(count == 0 || count < burst.chunk(i).remaining, "a tree reaches past its chunk's limit");
    for (std::int32_t node = 0; node < count; ++node) {
      const std::int32_t parent = parents.data()[i * parents.shape(1) + node];
      require(parent >= -1 && parent < node, "a node follows its parent");
    }
  }
  require(static_cast<std::int64_t>(inputs.size()) == 6 * num_chunks * tokens_per_chunk + 2 * max_moves,
          "inputs are six fields of all rows, then sources and targets of the moves");
  check_seq_slots(burst, tables);
  return burst.lay_out({tokens.data(), parents.data(), counts.data(), static_cast<std::int64_t>(tokens.shape(1))},
                       {tables.data(), static_cast<std::int64_t>(tables.shape(1))}, num_chunks, tokens_per_chunk,
                       inputs.data(), max_moves, inputs.data() + 6 * num_chunks * tokens_per_chunk);
}

void settle(DraftBurst& burst, Table<const float> sampled, Table<const std::int32_t> tables, float near_tie,
            Array<std::int32_t> tokens, Array<std::int64_t> offsets) {
  require(sampled.shape(1) == 4, "a sample is a row of four");
  require(static_cast<std::int64_t>(sampled.shape(0)) >= burst.num_laid_out(), "fewer samples than rows were laid out");
  require(static_cast<std::int64_t>(tokens.size()) >= burst.most_tokens(), "fewer places than tokens may be generated");
  require(static_cast<std::int64_t>(offsets.size()) == burst.size() + 1, "offsets of every chunk, and the end");
  check_seq_slots(burst, tables);
  burst.settle(sampled.data(), {tables.data(), static_cast<std::int64_t>(tables.shape(1))}, near_tie, tokens.data(),
               offsets.data());
}

}  // namespace

NB_MODULE(_draft_burst, m) {
  m.doc() = "Verification steps in one go; see csrc/engine/draft_burst.h.";
  const auto as_is = nb::arg().noconvert();
  nb::class_<BurstChunk>(m, "BurstChunk")
      .def_ro("tokens", &BurstChunk::tokens)
      .def_ro("logprobs", &BurstChunk::logprobs)
      .def_ro("raw_logprobs", &BurstChunk::raw_logprobs)
      .def_ro("stopped", &BurstChunk::stopped)
      .def_ro("num_drafted", &BurstChunk::drafted)
      .def_ro("num_accepted", &BurstChunk::accepted);
  nb::class_<DraftBurst>(m, "DraftBurst")
      .def(
          "__init__",
          [](DraftBurst* self, std::int64_t block_size, std::int64_t first_scratch_slot, std::int32_t spare_seq_slot,
             std::int32_t spare_slot) {
            require(block_size > 0, "a block has at least one token");
            new (self) DraftBurst({block_size, first_scratch_slot, spare_seq_slot, spare_slot});
          },
          nb::kw_only(), nb::arg("block_size"), nb::arg("first_scratch_slot"), nb::arg("spare_seq_slot"),
          nb::arg("spare_slot"))
      .def(
          "add",
          [](DraftBurst& self, std::int32_t seq_slot, std::int64_t root, std::int32_t token, std::int64_t remaining,
             std::vector<std::int32_t> stop_ids) {
            require(remaining > 0 && root >= 0, "a chunk that has something to say");
            BurstChunk chunk{};
            chunk.seq_slot = seq_slot, chunk.root = root, chunk.token = token, chunk.remaining = remaining;
            chunk.stop_ids = std::move(stop_ids);
            self.add(std::move(chunk));
          },
          nb::kw_only(), nb::arg("seq_slot"), nb::arg("root"), nb::arg("token"), nb::arg("remaining"),
          nb::arg("stop_ids"))
      .def("__len__", &DraftBurst::size)
      .def("__getitem__", &DraftBurst::chunk, nb::rv_policy::reference_internal)
      .def_prop_ro("num_live", &DraftBurst::num_live)
      .def_prop_ro("num_near_ties", &DraftBurst::num_near_ties)
      .def_prop_ro("tried", &DraftBurst::tried)
      .def_prop_ro("taken", &DraftBurst::taken)
      .def(
          "limit",
          [](DraftBurst& self, Array<const std::int32_t> most, Array<std::int32_t> out) {
            const auto size = static_cast<std::size_t>(self.size());
            require(most.size() == size && out.size() == size, "one limit per chunk");
            self.limit(most.data(), out.data());
          },
          as_is, as_is)
      .def("lay_out", &lay_out, as_is, as_is, as_is, as_is, nb::arg(), nb::arg(), nb::arg(), as_is)
      .def("settle", &settle, as_is, as_is, nb::arg(), as_is, as_is)
      .def("take_moves", &DraftBurst::take_moves);
}
