// SPDX-License-Identifier: Apache-2.0
// Python face of DraftIndex: batches over caller-owned arrays, the interpreter lock released while working.
//
// Arrays are checked before the lock is released: shapes must agree and tokens must be non-negative. A bad batch
// changes nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "draft_index.h"

namespace nb = nanobind;
using namespace seer::drafting;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<T, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = Array<const std::uint64_t>;
using Tokens = Array<const std::int32_t>;

// `message` is called only to complain: putting a sentence together takes longer than drafting a token.
template <class Message>
void require(bool condition, Message&& message) {
  if (!condition) throw nb::value_error(std::string(message()).c_str());
}

void require_size(std::size_t got, std::size_t wanted, const char* name) {
  require(got == wanted, [&] {
    return std::string(name) + " has " + std::to_string(got) + " entries, expected " + std::to_string(wanted);
  });
}

void require_tokens(const Tokens& tokens) {
  // One pass without a branch per element: a minimum vectorises.
  std::int32_t lowest = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) lowest = std::min(lowest, tokens.data()[i]);
  require(lowest >= 0, [&] { return "tokens must not be negative, got " + std::to_string(lowest); });
}

void require_offsets(const Array<const std::int64_t>& offsets, std::size_t items, std::size_t tokens) {
  require_size(offsets.size(), items + 1, "offsets");
  const std::int64_t* o = offsets.data();
  bool rising = o[0] == 0 && static_cast<std::size_t>(o[items]) == tokens;
  for (std::size_t i = 0; i < items; ++i) rising = rising && o[i] <= o[i + 1];
  require(rising, [&] { return "offsets must rise from 0 to the number of tokens, " + std::to_string(tokens); });
}

struct DraftArrays {
  Array<const std::int32_t> budgets;
  Table<std::int32_t> tokens, parents;
  Table<float> confidence;
  Array<std::int32_t> counts;

  // Rows of the output tables are `width` apart and no budget may be wider.
  std::size_t check(std::size_t items) const {
    require_size(budgets.size(), items, "budgets");
    require_size(counts.size(), items, "out_counts");
    const std::size_t width = tokens.shape(1);
    const auto shaped = [&](std::size_t rows, std::size_t columns) { return rows == items && columns == width; };
    require(shaped(tokens.shape(0), tokens.shape(1)) && shaped(parents.shape(0), parents.shape(1)) &&
                shaped(confidence.shape(0), confidence.shape(1)),
            [&] {
              return "out_tokens, out_parents and out_confidence must all be (" + std::to_string(items) + ", width)";
            });
    for (std::size_t i = 0; i < items; ++i) {
      const std::int32_t budget = budgets.data()[i];
      require(budget >= 0 && static_cast<std::size_t>(budget) <= width,
              [&] { return "budget " + std::to_string(budget) + " does not fit rows of " + std::to_string(width); });
    }
    return width;
  }
  DraftRow row(std::size_t item, std::size_t width) const {
    return {tokens.data() + item * width, parents.data() + item * width, confidence.data() + item * width};
  }
};

DraftOptions options(std::int32_t paths, float min_confidence, std::int64_t match_min, std::int64_t match_max) {
  require(paths >= 1, [&] { return "paths must be at least 1, got " + std::to_string(paths); });
  require(min_confidence >= 0 && min_confidence <= 1, [] { return "min_confidence must be within [0, 1]"; });
  require(match_min >= 1 && match_max >= match_min && match_max <= UINT32_MAX, [&] {
    return "need 1 <= match_min <= match_max, got " + std::to_string(match_min) + " and " + std::to_string(match_max);
  });
  return DraftOptions{paths, min_confidence, static_cast<std::uint32_t>(match_min),
                      static_cast<std::uint32_t>(match_max)};
}

void append(DraftIndex& index, Ids groups, Ids requests, Array<const std::int64_t> previous_counts, Tokens tokens,
            Array<const std::int64_t> offsets, Array<std::int64_t> out_lengths) {
  const std::size_t items = groups.size();
  require_size(requests.size(), items, "requests");
  require_size(previous_counts.size(), items, "previous_counts");
  require_size(out_lengths.size(), items, "out_lengths");
  require_offsets(offsets, items, tokens.size());
  require_tokens(tokens);
  for (std::size_t i = 0; i < items; ++i) {
    require(previous_counts.data()[i] >= 0, [] { return "previous_counts must not be negative"; });
  }
  const std::int64_t* o = offsets.data();
  nb::gil_scoped_release unlocked;
  DraftIndex::Cursor cursor;
  for (std::size_t i = 0; i < items; ++i) {
    out_lengths.data()[i] = index.append(cursor, groups.data()[i], requests.data()[i],
                                         static_cast<std::uint64_t>(previous_counts.data()[i]), tokens.data() + o[i],
                                         static_cast<std::size_t>(o[i + 1] - o[i]));
  }
}

void speculate(DraftIndex& index, Ids groups, Ids requests, Array<const std::int32_t> budgets,
               Table<std::int32_t> out_tokens, Table<std::int32_t> out_parents, Table<float> out_confidence,
               Array<std::int32_t> out_counts, std::int32_t paths, float min_confidence, std::int64_t match_min,
               std::int64_t match_max, bool learn) {
  const std::size_t items = groups.size();
  require_size(requests.size(), items, "requests");
  const DraftArrays out{budgets, out_tokens, out_parents, out_confidence, out_counts};
  const std::size_t width = out.check(items);
  const DraftOptions chosen = options(paths, min_confidence, match_min, match_max);
  nb::gil_scoped_release unlocked;
  Drafter drafter(index.hits(), index.calibration());
  std::vector<DraftIndex::DraftItem> batch(items);
  for (std::size_t i = 0; i < items; ++i) {
    batch[i] = {groups.data()[i], requests.data()[i], budgets.data()[i], out.row(i, width), 0};
  }
  index.speculate(drafter, batch.data(), items, chosen, learn);
  for (std::size_t i = 0; i < items; ++i) out_counts.data()[i] = batch[i].size;
}

void speculate_context(DraftIndex& index, Ids groups, Tokens contexts, Array<const std::int64_t> offsets,
                       Array<const std::int32_t> budgets, Table<std::int32_t> out_tokens,
                       Table<std::int32_t> out_parents, Table<float> out_confidence, Array<std::int32_t> out_counts,
                       std::int32_t paths, float min_confidence, std::int64_t match_min, std::int64_t match_max) {
  const std::size_t items = groups.size();
  require_offsets(offsets, items, contexts.size());
  require_tokens(contexts);
  const DraftArrays out{budgets, out_tokens, out_parents, out_confidence, out_counts};
  const std::size_t width = out.check(items);
  const DraftOptions chosen = options(paths, min_confidence, match_min, match_max);
  const std::int64_t* o = offsets.data();
  nb::gil_scoped_release unlocked;
  Drafter drafter(index.hits(), index.calibration());
  for (std::size_t i = 0; i < items; ++i) {
    out_counts.data()[i] = index.speculate_context(drafter, groups.data()[i], contexts.data() + o[i],
                                                   static_cast<std::size_t>(o[i + 1] - o[i]), budgets.data()[i], chosen,
                                                   out.row(i, width));
  }
}

void feedback(DraftIndex& index, Array<const float> confidence, Array<const bool> accepted) {
  require_size(accepted.size(), confidence.size(), "accepted");
  nb::gil_scoped_release unlocked;
  for (std::size_t i = 0; i < confidence.size(); ++i) index.feedback(confidence.data()[i], accepted.data()[i]);
}

std::size_t drop(DraftIndex& index, Ids groups) {
  nb::gil_scoped_release unlocked;
  std::size_t dropped = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) dropped += index.drop(groups.data()[i]) ? 1 : 0;
  return dropped;
}

nb::dict stats(const DraftIndex& index) {
  IndexStats total;
  {
    nb::gil_scoped_release unlocked;
    total = index.stats();
  }
  nb::dict out;
  out["groups"] = total.groups;
  out["requests"] = total.requests;
  out["tokens"] = total.tokens;
  out["branches"] = total.branches;
  out["bytes"] = total.bytes;
  out["evicted_groups"] = total.evicted_groups;
  return out;
}

void read_tokens(const DraftIndex& index, std::uint64_t group, std::uint64_t request, std::uint64_t start,
                 Array<std::int32_t> out, std::size_t* written) {
  const std::vector<Token> tokens = index.tokens(group, request, start);
  *written = std::min(tokens.size(), out.size());
  std::copy_n(tokens.begin(), *written, out.data());
}

}  // namespace

NB_MODULE(_index, module) {
  // No array is ever converted: a converted output would be a copy, and what is written to it lost.
  const auto as_is = nb::arg().noconvert();
  module.doc() = "Native draft index; use seer.drafting.index.";
  nb::class_<DraftIndex>(module, "Index")
      .def(nb::init<std::uint64_t>(), nb::arg("memory_limit_bytes"))
      .def("set_prompt",
           [](DraftIndex& index, std::uint64_t group, Tokens tokens) {
             require_tokens(tokens);
             nb::gil_scoped_release unlocked;
             return index.set_prompt(group, tokens.data(), tokens.size());
           })
      .def("append", &append, as_is, as_is, as_is, as_is, as_is, as_is)
      .def("speculate", &speculate, as_is, as_is, as_is, as_is, as_is, as_is, as_is, nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg())
      .def("speculate_context", &speculate_context, as_is, as_is, as_is, as_is, as_is, as_is, as_is, as_is, nb::arg(),
           nb::arg(), nb::arg(), nb::arg())
      .def("feedback", &feedback, as_is, as_is)
      .def("drop", &drop, as_is)
      .def("stats", &stats)
      .def("length", &DraftIndex::length)
      .def("requests", &DraftIndex::requests)
      .def(
          "read_tokens",
          [](const DraftIndex& index, std::uint64_t group, std::uint64_t request, std::uint64_t start,
             Array<std::int32_t> out) {
            nb::gil_scoped_release unlocked;
            std::size_t written;
            read_tokens(index, group, request, start, out, &written);
            return written;
          },
          nb::arg(), nb::arg(), nb::arg(), as_is)
      .def("count", [](const DraftIndex& index, std::uint64_t group,
                       Tokens pattern) { return index.count(group, pattern.data(), pattern.size()); })
      .def("followers", [](const DraftIndex& index, std::uint64_t group,
                           Tokens pattern) { return index.followers(group, pattern.data(), pattern.size()); })
      .def("anchor_length", &DraftIndex::anchor_length)
      .def("correct", [](const DraftIndex& index,
                         float raw) { return index.calibration().map().correct(std::clamp(raw, 0.0f, 1.0f)); })
      .def("check_integrity", &DraftIndex::check_integrity);
}
