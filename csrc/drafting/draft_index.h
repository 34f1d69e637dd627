// SPDX-License-Identifier: Apache-2.0
// All groups of one process: lookup, locks, memory limit, batches.
//
// Locking. A shared mutex guards the table of groups; each group has one small mutex. A long append gives the group's
// lock up every kQuantum tokens (about 20 us), so a draft never waits for a whole rebuild. Groups are shared pointers:
// dropping one while another thread reads it only unlinks it. Drafts made together hold the locks of all their groups;
// only the first is waited for, so that two batches cannot wait for each other.
//
// Appending is idempotent by position. `previous_count` says how many tokens of the response came before these: what is
// known already is skipped, a gap is refused. The result is the number of tokens held afterwards, so a caller that
// gets less than previous_count + tokens knows where to resend from. Overlapping tokens that differ are a conflict:
// the response was generated anew (its instance died) and must be given another request id.
//
// Memory. When the groups together pass the limit, the least recently used ones are dropped; the group being appended
// to goes last.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "automaton.h"
#include "calibration.h"
#include "drafter.h"
#include "hit_table.h"

namespace seer::drafting {

using GroupId = std::uint64_t;
using RequestId = std::uint64_t;

struct IndexStats {
  std::uint64_t groups = 0, requests = 0, tokens = 0, branches = 0, bytes = 0, evicted_groups = 0;
};

class DraftIndex {
 public:
  static constexpr std::int64_t kConflict = -1;  // append: the overlap differs

  explicit DraftIndex(std::uint64_t memory_limit_bytes) : memory_limit_bytes_(memory_limit_bytes) {}

  // Makes a group's prompt known: it is indexed once, and responses started from now on are seen to follow it. Returns
  // false, changing nothing, if the group has a prompt.
  bool set_prompt(GroupId group, const Token* tokens, std::size_t size);

  class Cursor;

  // Returns the tokens now held of this response (see above), or kConflict.
  std::int64_t append(GroupId group, RequestId request, std::uint64_t previous_count, const Token* tokens,
                      std::size_t size);
  std::int64_t append(Cursor& cursor, GroupId group, RequestId request, std::uint64_t previous_count,
                      const Token* tokens, std::size_t size);

  // One response to draft for.
  struct DraftItem {
    GroupId group;
    RequestId request;
    int budget;
    DraftRow out;
    int size;  // nodes drafted, written here; 0 for an unknown response
  };
  // Drafts for a batch. With `learn`, the index remembers each draft and scores it when the response grows.
  void speculate(Drafter& drafter, DraftItem* items, std::size_t count, const DraftOptions& options, bool learn);
  int speculate_context(Drafter& drafter, GroupId group, const Token* context, std::size_t size, int budget,
                        const DraftOptions& options, const DraftRow& out);

  // A node that was given this confidence was, or was not, accepted.
  void feedback(float confidence, bool accepted) {
    calibration_.observe(calibration_.map().invert(confidence), accepted);
  }

  // Whether the group was there.
  bool drop(GroupId group);
  IndexStats stats() const;

  // ---- for synchronising and looking inside
  std::uint64_t length(GroupId group, RequestId request) const;
  std::vector<RequestId> requests(GroupId group) const;
  std::vector<Token> tokens(GroupId group, RequestId request, std::uint64_t from) const;
  std::uint32_t count(GroupId group, const Token* pattern, std::size_t size) const;
  std::vector<std::pair<Token, std::uint32_t>> followers(GroupId group, const Token* pattern, std::size_t size) const;
  std::uint32_t anchor_length(GroupId group, RequestId request) const;
  std::string check_integrity(GroupId group) const;

  const HitTable& hits() const { return hits_; }
  const Calibration& calibration() const { return calibration_; }

 private:
  static constexpr std::size_t kQuantum = 64;
  // Tokens of the prompt's end in front of each response. Two to four raise acceptance by 1% where there are no
  // siblings yet; with the whole prompt in front of each response its counts drown theirs (-2.5% with 15 siblings).
  static constexpr std::size_t kLead = 4;

  struct DraftNode {
    Token token;
    std::int32_t parent;
    float raw;  // confidence before correction
  };
  // A draft waiting to be scored against what the response really became.
  struct OpenDraft {
    std::vector<DraftNode> nodes;
    std::int32_t reached = -1;  // node the response has followed so far, -1 at the root
    bool open() const { return !nodes.empty(); }
  };
  struct Member {
    Sequence sequence;
    OpenDraft draft;
  };
  struct Group {
    mutable std::mutex mutex;
    SuffixAutomaton text;
    std::unordered_map<RequestId, Member> members;
    std::vector<Token> lead;  // the prompt's last kLead tokens
    bool has_prompt = false;
    std::atomic<std::uint64_t> last_used{0};
    std::uint64_t counted_bytes = 0;  // part of bytes_ that is this group's; guarded by the mutex
    std::uint64_t tokens = 0;
    bool dropped = false;  // no longer in the table: its bytes are not counted any more
  };
  using GroupPtr = std::shared_ptr<Group>;

  GroupPtr find(GroupId group) const;
  // Moves the cursor to a group; false if there is none.
  bool seek(Cursor& cursor, GroupId group) const;
  GroupPtr find_or_create(GroupId group);
  void touch(Group& group) const;
  std::int64_t append_quantum(Group& group, RequestId request, std::uint64_t previous_count, const Token* tokens,
                              std::size_t size);
  void score(OpenDraft& draft, Token token);
  void recount(Group& group);
  void unlink(const GroupPtr& group);
  bool enforce_limit(GroupId keep);
  class Window;
  std::size_t speculate_together(Drafter& drafter, DraftItem* items, std::size_t count, const DraftOptions& options,
                                 bool learn);
  static void remember(const DraftRow& drafted, int size, OpenDraft* out);
  static void correct(const Calibration::Map& map, int size, float* confidence);

  const std::uint64_t memory_limit_bytes_;
  HitTable hits_;
  Calibration calibration_;
  mutable std::shared_mutex table_mutex_;
  std::unordered_map<GroupId, GroupPtr> table_;
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> evicted_groups_{0};
  mutable std::atomic<std::uint64_t> clock_{0};
};

// Where a batch is: the group of its latest item, looked up once for neighbours that share it.
class DraftIndex::Cursor {
 private:
  friend class DraftIndex;
  void move(GroupId id, GroupPtr group) {
    id_ = id;
    group_ = std::move(group);
  }
  GroupId id_ = 0;
  GroupPtr group_;  // null: at no group
};

}  // namespace seer::drafting
