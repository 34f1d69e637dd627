// SPDX-License-Identifier: Apache-2.0
// Pins: which request needs which block.
#include "crash_point.h"
#include "index.h"

namespace seer::kvpool {

void Index::link_pin(uint32_t p) {
  Pin& pin = pins_[p];
  Entry& of = entries_[pin.entry];
  uint32_t& first = buckets_[bucket(pin.request)];
  need(first == kNone || first < config_.num_pins, "pin bucket");
  need(of.pin_head == kNone || of.pin_head < config_.num_pins, "pin of entry");
  pin.request_previous = kNone;
  pin.request_next = first;
  if (first != kNone) pins_[first].request_previous = p;
  first = p;
  pin.entry_previous = kNone;
  pin.entry_next = of.pin_head;
  if (of.pin_head != kNone) pins_[of.pin_head].entry_previous = p;
  else ++header_->num_pinned;
  of.pin_head = p;
}

void Index::unlink_pin(uint32_t p) {
  Pin& pin = pins_[p];
  const uint32_t limit = config_.num_pins;
  need(pin.entry < config_.num_entries, "entry of pin");
  uint32_t& first = buckets_[bucket(pin.request)];
  Entry& of = entries_[pin.entry];
  auto unlink = [&](uint32_t before, uint32_t after, uint32_t& head, uint32_t Pin::* next, uint32_t Pin::* previous) {
    need(before == kNone ? head == p : before < limit && pins_[before].*next == p, "pin chain");
    need(after == kNone || (after < limit && pins_[after].*previous == p), "pin chain");
    (before == kNone ? head : pins_[before].*next) = after;
    if (after != kNone) pins_[after].*previous = before;
  };
  unlink(pin.request_previous, pin.request_next, first, &Pin::request_next, &Pin::request_previous);
  unlink(pin.entry_previous, pin.entry_next, of.pin_head, &Pin::entry_next, &Pin::entry_previous);
  if (of.pin_head == kNone) --header_->num_pinned;
}

void Index::void_pin(uint32_t p) {
  need(p < config_.num_pins, "pin");
  unlink_pin(p);
  pins_[p].check = 0;
  pins_[p].entry = kNone;
  need(header_->num_free_pins < config_.num_pins, "free pins");
  free_pins_[header_->num_free_pins++] = p;
}

bool Index::pin(uint32_t e, const RequestId& request) {
  const uint32_t p = sound([&]() -> uint32_t {
    uint32_t steps = 0;
    for (uint32_t at = entries_[e].pin_head; at != kNone; at = pins_[at].entry_next) {
      need(at < config_.num_pins && pins_[at].entry == e && steps++ < config_.num_pins, "pin of entry");
      need(pins_[at].check == pins_[at].computed_check(), "pin");
      if (pins_[at].request == request) return kNone - 1;
    }
    return pop(free_pins_, header_->num_free_pins, config_.num_pins, nullptr);
  });
  if (p == kNone - 1) return true;
  if (p == kNone) return false;
  Pin& pin = pins_[p];
  pin.request = request;
  pin.generation = entries_[e].generation;
  pin.entry = e;
  pin.check = pin.computed_check();
  may_crash(CrashPoint::kPinning);
  fixed([&] {
    const bool first = entries_[e].pin_head == kNone;
    link_pin(p);
    if (first && entries_[e].list != kNone) relist(e);
  });
  return true;
}

uint32_t Index::unpin(const RequestId& request, bool drop_blocks) {
  uint32_t num = 0;
  for (;;) {
    const uint32_t p = sound([&]() -> uint32_t {
      uint32_t at = buckets_[bucket(request)], steps = 0;
      for (; at != kNone; at = pins_[at].request_next) {
        need(at < config_.num_pins && steps++ < config_.num_pins, "pin bucket");
        need(pins_[at].check == pins_[at].computed_check(), "pin");
        if (pins_[at].request == request) break;
      }
      return at;
    });
    if (p == kNone) return num;
    const uint32_t e = pins_[p].entry;
    fixed([&] { void_pin(p); });
    may_crash(CrashPoint::kFreeing);
    Word at;
    if (entries_[e].pin_head == kNone && unpack(entries_[e].word.load(), &at) && at.state == State::kHeld) {
      if (drop_blocks) {
        drop(e);
        count(kFreed);
        ++num;
        continue;
      }
      fixed([&] { relist(e); });
    }
    if (!drop_blocks) ++num;
  }
}

}  // namespace seer::kvpool
