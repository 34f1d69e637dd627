// SPDX-License-Identifier: Apache-2.0
// Python's view of the arena: parses keys and buffers, lets go of the GIL, turns failures into exceptions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arena.h"
#include "crash_point.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace seer::kvpool {
namespace {

// Buffers of Python objects, held until the call is over.
class Views {
 public:
  Views() = default;
  Views(const Views&) = delete;
  ~Views() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  Buffer add(nb::handle object, bool writable) {
    if (PyObject_CheckBuffer(object.ptr())) {
      Py_buffer view;
      if (PyObject_GetBuffer(object.ptr(), &view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) throw nb::python_error();
      views_.push_back(view);
      return {static_cast<uint8_t*>(view.buf), size_t(view.len)};
    }
    // Tensors of other libraries come through DLPack.
    nb::ndarray<nb::c_contig, nb::device::cpu> array;
    if (!nb::try_cast(object, array, false))
      throw nb::type_error("a buffer must be contiguous, in host memory, and writable where it is to be filled");
    arrays_.push_back(array);
    return {static_cast<uint8_t*>(array.data()), array.nbytes()};
  }

  // One buffer per key: a sequence of them, or one array with a row per key.
  std::vector<Buffer> add_all(nb::handle buffers, size_t num, bool writable) {
    std::vector<Buffer> blocks;
    blocks.reserve(num);
    if (PyList_Check(buffers.ptr()) || PyTuple_Check(buffers.ptr())) {
      for (nb::handle one : nb::borrow<nb::sequence>(buffers)) blocks.push_back(add(one, writable));
    } else {
      if (nb::len(buffers) != num) throw nb::value_error("as many rows as keys are needed");
      const Buffer whole = add(buffers, writable);
      for (size_t i = 0; i < num; ++i) blocks.push_back({whole.data + i * (whole.bytes / num), whole.bytes / num});
    }
    if (blocks.size() != num) throw nb::value_error("as many buffers as keys are needed");
    return blocks;
  }

 private:
  std::vector<Py_buffer> views_;
  std::vector<nb::ndarray<nb::c_contig, nb::device::cpu>> arrays_;
};

struct KeyView {
  const uint8_t* data;
  size_t num;
  KeyView(Views& views, nb::handle keys) {
    const Buffer all = views.add(keys, false);
    if (all.bytes % kKeyBytes) throw nb::value_error("keys must be 32 bytes each");
    data = all.data;
    num = all.bytes / kKeyBytes;
  }
};

RequestId request_id(nb::bytes digest) {
  if (digest.size() != 16) throw nb::value_error("a request digest has 16 bytes");
  RequestId id;
  std::memcpy(&id, digest.c_str(), 16);
  return id;
}

nb::list to_list(const std::vector<bool>& flags) {
  nb::list list;
  for (bool flag : flags) list.append(flag);
  return list;
}

void check_lengths(const Arena& arena, const std::vector<Buffer>& blocks, uint64_t slot_bytes) {
  (void)arena;
  for (const Buffer& block : blocks)
    if (block.bytes == 0 || block.bytes > slot_bytes)
      throw nb::value_error(("a block of " + std::to_string(block.bytes) + " bytes does not fit slots of " +
                             std::to_string(slot_bytes) + " bytes")
                                .c_str());
}

template <class Work>
auto without_gil(Work work) {
  nb::gil_scoped_release released;
  return work();
}

Config make_config(uint64_t slot_bytes, uint32_t dram_slots, uint32_t ssd_slots, uint32_t num_pins, nb::bytes identity,
                   const std::string& run) {
  if (!slot_bytes || slot_bytes > (uint64_t{1} << 31) || !dram_slots || dram_slots > kMaxSlots || ssd_slots > kMaxSlots)
    throw nb::value_error("slot size or number of slots is out of range");
  Config config = sized_config(slot_bytes, dram_slots, ssd_slots, num_pins);
  if (identity.size() != sizeof config.identity) throw nb::value_error("an identity has 16 bytes");
  std::memcpy(config.identity, identity.c_str(), sizeof config.identity);
  std::strncpy(config.run, run.c_str(), sizeof config.run - 1);
  return config;
}

nb::dict describe(const Config& config) {
  nb::dict d;
  d["file_bytes"] = config.file_bytes;
  d["slot_bytes"] = config.slot_bytes;
  d["stride_bytes"] = config.stride_bytes;
  d["dram_slots"] = config.dram_slots;
  d["ssd_slots"] = config.ssd_slots;
  d["num_pins"] = config.num_pins;
  d["run"] = std::string(config.run);
  d["boot"] = std::string(config.boot);
  return d;
}

nb::dict stats(Arena& arena) {
  const Header& h = *arena.file().header();
  static const char* kNames[] = {"put",     "duplicate", "refused",  "hit_dram",   "hit_ssd",   "miss",
                                 "corrupt", "spilled",   "promoted", "prefetched", "evicted",   "freed",
                                 "failed",  "repaired",  "reaped",   "wrong_size", "bytes_put", "bytes_got"};
  static_assert(sizeof(kNames) / sizeof(char*) == kNumCounters);
  nb::dict d;
  for (uint32_t i = 0; i < kNumCounters; ++i) d[kNames[i]] = h.counters[i].load();
  d["num_held"] = h.num_held;
  d["num_pinned"] = h.num_pinned;
  d["num_claims"] = h.num_claims;
  d["dram_bytes"] = h.dram_bytes;
  d["ssd_bytes"] = h.ssd_bytes;
  d["free_dram"] = h.num_free_dram;
  d["free_ssd"] = h.num_free_ssd;
  static const char* kCalls[] = {"put", "get", "lookup"};
  nb::dict latency;
  for (uint32_t call = 0; call < kNumCalls; ++call) {
    nb::list buckets;
    for (const auto& bucket : h.latency[call]) buckets.append(bucket.load());
    latency[kCalls[call]] = buckets;
  }
  d["latency"] = latency;
  return d;
}

nb::dict regions(Arena& arena) {
  const Sections& s = arena.sections();
  nb::dict d;
  auto add = [&d](const char* name, uint64_t from, uint64_t to) { d[name] = nb::make_tuple(from, to - from); };
  add("config", 0, sizeof(Config) + 8);
  add("lock", offsetof(Header, mutex), offsetof(Header, keeper_bell));
  add("dropped", offsetof(Header, dropped), offsetof(Header, next_dropped));
  add("totals", offsetof(Header, num_free_entries), offsetof(Header, clients));
  add("entries", s.entries, s.pins);
  add("pins", s.pins, s.cells);
  add("cells", s.cells, s.dram_owner);
  add("owners", s.dram_owner, s.free_entries);
  add("free", s.free_entries, s.buckets);
  add("buckets", s.buckets, s.data);
  add("data", s.data, s.end);
  return d;
}

nb::object locate(Arena& arena, nb::handle key) {
  Views views;
  const KeyView keys(views, key);
  if (keys.num != 1) throw nb::value_error("one key is needed");
  const Arena::Place place = without_gil([&] { return arena.locate(keys.data); });
  if (!place.held) return nb::none();
  nb::dict d;
  const uint64_t entry = arena.sections().entries + uint64_t{place.entry} * sizeof(Entry);
  d["entry_offset"] = entry;
  d["word_offset"] = entry + offsetof(Entry, word);
  d["length"] = place.length;
  d["dram_offset"] = place.dram == kNoSlot ? nb::object(nb::none()) : nb::cast(arena.dram_offset(place.dram));
  d["ssd_offset"] = place.ssd == kNoSlot ? nb::object(nb::none()) : nb::cast(arena.ssd_offset(place.ssd));
  return d;
}

}  // namespace
}  // namespace seer::kvpool

NB_MODULE(_arena, m) {
  using namespace seer::kvpool;
  nb::set_leak_warnings(false);  // a process that ends in the middle of a call is no bug of the bindings
  m.doc() = "Shared-memory arena, crash-safe index and SSD slab of the local KV pool.";

  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const PoolFailure& failure) {
      // Imported when needed: the module must not depend on the package being importable at load time.
      nb::object type = nb::module_::import_("seer.errors").attr("PoolError");
      PyErr_SetString(type.ptr(), failure.message.c_str());
    }
  });

  m.def(
      "checksum",
      [](nb::handle block, bool portable) {
        Views views;
        const Buffer data = views.add(block, false);
        return portable ? copy_sum_portable(nullptr, data.data, data.bytes) : sum(data.data, data.bytes);
      },
      "block"_a, "portable"_a = false);
  m.def(
      "copy_checksum",
      [](nb::handle target, nb::handle source, bool portable) {
        Views views;
        const Buffer from = views.add(source, false), to = views.add(target, true);
        if (from.bytes != to.bytes) throw nb::value_error("source and target differ in size");
        return without_gil([&] {
          return portable ? copy_sum_portable(to.data, from.data, from.bytes)
                          : copy_sum(to.data, from.data, from.bytes);
        });
      },
      "target"_a, "source"_a, "portable"_a = false);
  m.def("word_check_survivors", [] {
    // Flips of one or two bits of a packed word or claim that its check would not notice; must be none for one bit.
    uint32_t one = 0, two = 0;
    Word word{State::kHeld, 12345, kNoSlot}, seen;
    const uint64_t packed = pack(word);
    for (int i = 0; i < 64; ++i) {
      one += unpack(packed ^ uint64_t{1} << i, &seen);
      for (int j = 0; j < i; ++j) two += unpack(packed ^ uint64_t{1} << i ^ uint64_t{1} << j, &seen);
    }
    return nb::make_tuple(one, two);
  });
  m.def("crash_points", [] {
    nb::list names;
    for (uint32_t i = 1; i < uint32_t(CrashPoint::kCount); ++i) names.append(kCrashPointNames[i]);
    return names;
  });
  m.def(
      "crash_at",
      [](const std::string& name, uint32_t after) {
        for (uint32_t i = 0; i < uint32_t(CrashPoint::kCount); ++i) {
          if (name != kCrashPointNames[i]) continue;
          crash_after = after;
          crash_point = i;
          return;
        }
        throw nb::value_error("no such crash point");
      },
      "name"_a, "after"_a = 0);

  m.def(
      "create",
      [](const std::string& arena, const std::string& slab, uint64_t slot_bytes, uint32_t dram_slots,
         uint32_t ssd_slots, uint32_t num_pins, nb::bytes identity, const std::string& run) {
        const Config config = make_config(slot_bytes, dram_slots, ssd_slots, num_pins, identity, run);
        without_gil([&] { Arena::create(arena, slab, config); });
      },
      "arena_path"_a, "slab_path"_a, "slot_bytes"_a, "dram_slots"_a, "ssd_slots"_a, "num_pins"_a, "identity"_a,
      "run"_a);
  m.def(
      "file_bytes",
      [](uint64_t slot_bytes, uint32_t dram_slots, uint32_t ssd_slots, uint32_t num_pins) {
        return Sections(make_config(slot_bytes, dram_slots, ssd_slots, num_pins, nb::bytes("0123456789abcdef", 16), ""))
            .end;
      },
      "slot_bytes"_a, "dram_slots"_a, "ssd_slots"_a, "num_pins"_a);
  m.def(
      "probe",
      [](const std::string& path) {
        const SharedFile::Probe probe = SharedFile::probe(path);
        nb::dict d = describe(probe.config);
        d["live_pids"] = nb::cast(probe.live_pids);
        return d;
      },
      "arena_path"_a);

  nb::class_<Arena>(m, "Arena")
      .def(
          "__init__",
          [](Arena* self, const std::string& arena, const std::string& slab, double deadline_s, bool populate) {
            nb::gil_scoped_release released;
            new (self) Arena(arena, slab, deadline_s, populate);
          },
          "arena_path"_a, "slab_path"_a, "deadline_s"_a, "populate"_a)
      .def(
          "lookup",
          [](Arena& self, nb::handle keys) {
            Views views;
            const KeyView view(views, keys);
            return without_gil([&] { return self.lookup(view.data, view.num); });
          },
          "keys"_a)
      .def(
          "put",
          [](Arena& self, nb::handle keys, nb::handle buffers, const std::vector<nb::bytes>& requests) {
            Views views;
            const KeyView view(views, keys);
            const std::vector<Buffer> blocks = views.add_all(buffers, view.num, false);
            check_lengths(self, blocks, self.file().config().slot_bytes);
            if (requests.size() > 1 && requests.size() != view.num)
              throw nb::value_error("none, one, or one request each");
            std::vector<RequestId> ids;
            for (const nb::bytes& request : requests) ids.push_back(request_id(request));
            return to_list(without_gil([&] { return self.put(view.data, blocks, ids); }));
          },
          "keys"_a, "buffers"_a, "requests"_a)
      .def(
          "get",
          [](Arena& self, nb::handle keys, nb::handle buffers, bool promote) {
            Views views;
            const KeyView view(views, keys);
            const std::vector<Buffer> blocks = views.add_all(buffers, view.num, true);
            return to_list(without_gil([&] { return self.get(view.data, blocks, promote); }));
          },
          "keys"_a, "buffers"_a, "promote"_a)
      .def(
          "pin",
          [](Arena& self, nb::bytes request, nb::handle keys) {
            Views views;
            const KeyView view(views, keys);
            const RequestId id = request_id(request);
            return without_gil([&] { return self.pin(id, view.data, view.num); });
          },
          "request"_a, "keys"_a)
      .def(
          "unpin",
          [](Arena& self, nb::bytes request, bool drop_blocks) {
            const RequestId id = request_id(request);
            return without_gil([&] { return self.unpin(id, drop_blocks); });
          },
          "request"_a, "drop_blocks"_a)
      .def(
          "promote",
          [](Arena& self, nb::handle keys) {
            Views views;
            const KeyView view(views, keys);
            return without_gil([&] { return self.promote(view.data, view.num); });
          },
          "keys"_a)
      .def("spill", &Arena::spill, "wanted"_a, "may_evict"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("keep", &Arena::keep, "wait_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("stop_keeping", &Arena::stop_keeping, nb::call_guard<nb::gil_scoped_release>())
      .def("drop_weights_version", &Arena::drop_weights_version, "weights_version"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("reap", &Arena::reap, nb::call_guard<nb::gil_scoped_release>())
      .def("rebuild", &Arena::rebuild, nb::call_guard<nb::gil_scoped_release>())
      .def("problems", &Arena::problems, nb::call_guard<nb::gil_scoped_release>())
      .def("locate", &locate, "key"_a)
      .def("stats", &stats)
      .def("regions", &regions)
      .def("config", [](Arena& self) { return describe(self.file().config()); });
}
