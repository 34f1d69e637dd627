// SPDX-License-Identifier: Apache-2.0
#include "draft_index.h"

#include <algorithm>
#include <mutex>

namespace seer::drafting {

std::int64_t DraftIndex::append(GroupId group, RequestId request, std::uint64_t previous_count, const Token* tokens,
                                std::size_t size) {
  Cursor cursor;
  return append(cursor, group, request, previous_count, tokens, size);
}

std::int64_t DraftIndex::append(Cursor& cursor, GroupId group_id, RequestId request, std::uint64_t previous_count,
                                const Token* tokens, std::size_t size) {
  std::size_t done = 0;
  while (true) {
    if (!seek(cursor, group_id)) {
      cursor.move(group_id, find_or_create(group_id));
      touch(*cursor.group_);
    }
    Group& group = *cursor.group_;
    const std::size_t quantum = std::min(size - done, kQuantum);
    std::int64_t held = 0;
    bool dropped = false;
    {
      std::lock_guard<std::mutex> lock(group.mutex);
      dropped = group.dropped;
      if (!dropped) {
        held = append_quantum(group, request, previous_count + done, tokens + done, quantum);
        recount(group);
      }
    }
    if (dropped) {  // since the cursor came here: begin the group anew
      cursor.move(0, nullptr);
      continue;
    }
    if (held == kConflict) return kConflict;
    if (static_cast<std::uint64_t>(held) < previous_count + done + quantum) return held;
    done += quantum;
    if (bytes_.load(std::memory_order_relaxed) > memory_limit_bytes_ && !enforce_limit(group_id)) return 0;
    if (done == size) return held;
  }
}

bool DraftIndex::set_prompt(GroupId group_id, const Token* tokens, std::size_t size) {
  const GroupPtr group = find_or_create(group_id);
  touch(*group);
  {
    std::lock_guard<std::mutex> lock(group->mutex);
    if (group->has_prompt) return false;
    group->has_prompt = true;
    group->lead.assign(tokens + size - std::min(size, kLead), tokens + size);
    Sequence prompt = group->text.begin(nullptr, 0);
    for (std::size_t i = 0; i < size; ++i) group->text.append(prompt, tokens[i], &hits_);
    recount(*group);
  }
  if (bytes_.load(std::memory_order_relaxed) > memory_limit_bytes_) enforce_limit(group_id);
  return true;
}

std::int64_t DraftIndex::append_quantum(Group& group, RequestId request, std::uint64_t previous_count,
                                        const Token* tokens, std::size_t size) {
  const auto known = group.members.find(request);
  const std::uint64_t held = known == group.members.end() ? 0 : known->second.sequence.length;
  if (previous_count > held) return static_cast<std::int64_t>(held);
  const std::size_t overlap = static_cast<std::size_t>(std::min<std::uint64_t>(held - previous_count, size));
  if (overlap > 0 && !group.text.same_tokens(known->second.sequence, static_cast<std::uint32_t>(previous_count),
                                             static_cast<std::uint32_t>(overlap), tokens)) {
    return kConflict;
  }
  Member& member = known == group.members.end() ? group.members[request] : known->second;
  if (member.sequence.tail == kNone) {
    member.sequence = group.text.begin(group.lead.data(), group.lead.size());
  }
  for (std::size_t i = overlap; i < size; ++i) {
    if (member.draft.open()) score(member.draft, tokens[i]);
    group.text.append(member.sequence, tokens[i], &hits_);
    ++group.tokens;
  }
  return static_cast<std::int64_t>(member.sequence.length);
}

// One more token of the response is known: the node that drafted it, if any, was right; its siblings and everything
// below them were wrong. What lies below the right one stays open.
void DraftIndex::score(OpenDraft& draft, Token token) {
  std::int32_t reached = -1;
  std::vector<DraftNode>& nodes = draft.nodes;
  constexpr Token kScored = kNoToken;
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(nodes.size()); ++i) {
    if (nodes[i].token == kScored) continue;
    const bool child = nodes[i].parent == draft.reached;
    if (child && nodes[i].token == token) {
      calibration_.observe(nodes[i].raw, true);
      reached = i;
      nodes[i].token = kScored;
      continue;
    }
    // A node under a scored parent that is not on the path shares its fate; so does a sibling of the right node.
    const bool lost = child || (nodes[i].parent != reached && nodes[nodes[i].parent].token == kScored);
    if (!lost) continue;
    calibration_.observe(nodes[i].raw, false);
    nodes[i].token = kScored;
  }
  draft.reached = reached;
  if (reached == -1) nodes.clear();
}

void DraftIndex::speculate(Drafter& drafter, DraftItem* items, std::size_t count, const DraftOptions& options,
                           bool learn) {
  for (std::size_t done = 0; done < count;) {
    done += speculate_together(drafter, items + done, count - done, options, learn);
  }
}

// The groups of the drafts made together, locked until the end.
class DraftIndex::Window {
 public:
  // The group, locked, or null if there is none. If another thread has it locked, `wait` is set instead: waiting might
  // be for ever while we hold other locks.
  Group* enter(const DraftIndex& index, GroupId id, bool* wait) {
    for (int i = size_; --i >= 0;) {
      if (ids_[i] == id) return groups_[i].get();
    }
    GroupPtr group = index.find(id);
    if (group == nullptr) return nullptr;
    if (size_ == 0) {
      group->mutex.lock();
    } else if (!group->mutex.try_lock()) {
      *wait = true;
      return nullptr;
    }
    index.touch(*group);
    ids_[size_] = id;
    groups_[size_] = std::move(group);
    return groups_[size_++].get();
  }
  ~Window() {
    while (--size_ >= 0) groups_[size_]->mutex.unlock();
  }

 private:
  int size_ = 0;
  GroupId ids_[Drafter::kTogether];
  GroupPtr groups_[Drafter::kTogether];
};

// Drafts for the first items, as many as can be drafted together; returns how many.
std::size_t DraftIndex::speculate_together(Drafter& drafter, DraftItem* items, std::size_t count,
                                           const DraftOptions& options, bool learn) {
  // Trees are made one by one anyway: they need not hold each other's locks.
  const std::size_t most = std::min<std::size_t>(count, options.paths > 1 ? 1 : Drafter::kTogether);
  Window window;
  Drafter::Job jobs[Drafter::kTogether];
  Member* members[Drafter::kTogether];
  DraftItem* drafted[Drafter::kTogether];
  int size = 0;
  std::size_t done = 0;
  for (; done < most; ++done) {
    DraftItem& item = items[done];
    bool wait = false;
    Group* const group = window.enter(*this, item.group, &wait);
    if (wait) break;
    item.size = 0;
    if (group == nullptr) continue;
    const auto member = group->members.find(item.request);
    if (member == group->members.end()) continue;
    members[size] = &member->second;
    drafted[size] = &item;
    jobs[size++] = {&group->text, &member->second.sequence, item.budget, item.out, 0};
  }
  drafter.draft(jobs, size, options);
  for (int i = 0; i < size; ++i) {
    if (learn) remember(jobs[i].out, jobs[i].size, &members[i]->draft);
    correct(drafter.calibration(), jobs[i].size, jobs[i].out.confidence);
    drafted[i]->size = jobs[i].size;
  }
  return done;
}

int DraftIndex::speculate_context(Drafter& drafter, GroupId group_id, const Token* context, std::size_t size,
                                  int budget, const DraftOptions& options, const DraftRow& out) {
  const GroupPtr group = find(group_id);
  if (group == nullptr) return 0;
  touch(*group);
  std::lock_guard<std::mutex> lock(group->mutex);
  const int drafted = drafter.draft_after(group->text, context, size, budget, options, out);
  correct(drafter.calibration(), drafted, out.confidence);
  return drafted;
}

void DraftIndex::remember(const DraftRow& drafted, int size, OpenDraft* out) {
  out->nodes.resize(static_cast<std::size_t>(size));
  out->reached = -1;
  for (int i = 0; i < size; ++i) {
    DraftNode& node = out->nodes[static_cast<std::size_t>(i)];
    node.token = drafted.tokens[i];
    node.parent = drafted.parents[i];
    node.raw = drafted.confidence[i];
  }
}

void DraftIndex::correct(const Calibration::Map& map, int size, float* confidence) {
  for (int i = 0; i < size; ++i) confidence[i] = map.correct(confidence[i]);
}

bool DraftIndex::drop(GroupId group_id) {
  GroupPtr group;
  {
    std::unique_lock<std::shared_mutex> lock(table_mutex_);
    const auto it = table_.find(group_id);
    if (it == table_.end()) return false;
    group = std::move(it->second);
    table_.erase(it);
  }
  unlink(group);
  return true;
}

DraftIndex::GroupPtr DraftIndex::find(GroupId group) const {
  std::shared_lock<std::shared_mutex> lock(table_mutex_);
  const auto it = table_.find(group);
  return it == table_.end() ? nullptr : it->second;
}

bool DraftIndex::seek(Cursor& cursor, GroupId group) const {
  if (cursor.group_ == nullptr || cursor.id_ != group) {
    cursor.move(group, find(group));
    if (cursor.group_ != nullptr) touch(*cursor.group_);
  }
  return cursor.group_ != nullptr;
}

DraftIndex::GroupPtr DraftIndex::find_or_create(GroupId group) {
  if (GroupPtr known = find(group)) return known;
  std::unique_lock<std::shared_mutex> lock(table_mutex_);
  GroupPtr& entry = table_[group];
  if (entry == nullptr) entry = std::make_shared<Group>();
  return entry;
}

void DraftIndex::touch(Group& group) const {
  group.last_used.store(clock_.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void DraftIndex::recount(Group& group) {
  if (group.dropped) return;
  constexpr std::uint64_t kMemberBytes = sizeof(Member) + 4 * sizeof(void*);
  const std::uint64_t now = group.text.bytes() + sizeof(Group) + group.members.size() * kMemberBytes;
  if (now == group.counted_bytes) return;
  bytes_.fetch_add(now - group.counted_bytes, std::memory_order_relaxed);
  group.counted_bytes = now;
}

// The group has left the table: a thread that still appends to it must not be counted.
void DraftIndex::unlink(const GroupPtr& group) {
  std::lock_guard<std::mutex> lock(group->mutex);
  group->dropped = true;
  bytes_.fetch_sub(group->counted_bytes, std::memory_order_relaxed);
  group->counted_bytes = 0;
}

// Drops least recently used groups until the rest fits. False if even `keep` had to go.
bool DraftIndex::enforce_limit(GroupId keep) {
  while (bytes_.load(std::memory_order_relaxed) > memory_limit_bytes_) {
    GroupId oldest = keep;
    {
      std::shared_lock<std::shared_mutex> lock(table_mutex_);
      std::uint64_t oldest_use = UINT64_MAX;
      for (const auto& [id, group] : table_) {
        const std::uint64_t used = group->last_used.load(std::memory_order_relaxed);
        if (id == keep || used >= oldest_use) continue;
        oldest = id;
        oldest_use = used;
      }
    }
    const bool gone = drop(oldest);
    if (gone) evicted_groups_.fetch_add(1, std::memory_order_relaxed);
    if (oldest == keep) return false;
  }
  return true;
}

IndexStats DraftIndex::stats() const {
  std::vector<GroupPtr> groups;
  {
    std::shared_lock<std::shared_mutex> lock(table_mutex_);
    for (const auto& entry : table_) groups.push_back(entry.second);
  }
  IndexStats total;
  total.groups = groups.size();
  for (const GroupPtr& group : groups) {
    std::lock_guard<std::mutex> lock(group->mutex);
    total.requests += group->members.size();
    total.tokens += group->tokens;
    total.branches += group->text.num_branches();
  }
  total.bytes = bytes_.load(std::memory_order_relaxed);
  total.evicted_groups = evicted_groups_.load(std::memory_order_relaxed);
  return total;
}

std::uint64_t DraftIndex::length(GroupId group_id, RequestId request) const {
  const GroupPtr group = find(group_id);
  if (group == nullptr) return 0;
  std::lock_guard<std::mutex> lock(group->mutex);
  const auto member = group->members.find(request);
  return member == group->members.end() ? 0 : member->second.sequence.length;
}

std::vector<RequestId> DraftIndex::requests(GroupId group_id) const {
  std::vector<RequestId> ids;
  const GroupPtr group = find(group_id);
  if (group == nullptr) return ids;
  std::lock_guard<std::mutex> lock(group->mutex);
  for (const auto& entry : group->members) ids.push_back(entry.first);
  std::sort(ids.begin(), ids.end());
  return ids;
}

std::vector<Token> DraftIndex::tokens(GroupId group_id, RequestId request, std::uint64_t from) const {
  std::vector<Token> copy;
  const GroupPtr group = find(group_id);
  if (group == nullptr) return copy;
  std::lock_guard<std::mutex> lock(group->mutex);
  const auto member = group->members.find(request);
  if (member == group->members.end() || member->second.sequence.length <= from) return copy;
  copy.resize(member->second.sequence.length - from);
  group->text.copy_tokens(member->second.sequence, static_cast<std::uint32_t>(from),
                          static_cast<std::uint32_t>(copy.size()), copy.data());
  return copy;
}

std::uint32_t DraftIndex::count(GroupId group_id, const Token* pattern, std::size_t size) const {
  const GroupPtr group = find(group_id);
  if (group == nullptr || size == 0) return 0;
  std::lock_guard<std::mutex> lock(group->mutex);
  State state = kRoot;
  for (std::size_t i = 0; i < size && state != kNone; ++i) state = group->text.step(state, pattern[i]);
  return state == kNone ? 0 : group->text.count(state);
}

std::vector<std::pair<Token, std::uint32_t>> DraftIndex::followers(GroupId group_id, const Token* pattern,
                                                                   std::size_t size) const {
  std::vector<std::pair<Token, std::uint32_t>> found;
  const GroupPtr group = find(group_id);
  if (group == nullptr || size == 0) return found;
  std::lock_guard<std::mutex> lock(group->mutex);
  State state = kRoot;
  for (std::size_t i = 0; i < size && state != kNone; ++i) state = group->text.step(state, pattern[i]);
  if (state == kNone) return found;
  SuffixAutomaton::Followers followers;
  group->text.followers(state, &followers);
  for (int i = 0; i < followers.size; ++i) {
    found.emplace_back(followers.edges[i].token, static_cast<std::uint32_t>(followers.count[i]));
  };
  return found;
}

std::uint32_t DraftIndex::anchor_length(GroupId group_id, RequestId request) const {
  const GroupPtr group = find(group_id);
  if (group == nullptr) return 0;
  std::lock_guard<std::mutex> lock(group->mutex);
  const auto member = group->members.find(request);
  if (member == group->members.end()) return 0;
  return group->text.length(group->text.link(member->second.sequence.tail));
}

std::string DraftIndex::check_integrity(GroupId group_id) const {
  const GroupPtr group = find(group_id);
  if (group == nullptr) return "no such group";
  std::lock_guard<std::mutex> lock(group->mutex);
  return group->text.check_integrity();
}

}  // namespace seer::drafting
