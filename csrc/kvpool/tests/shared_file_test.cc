// SPDX-License-Identifier: Apache-2.0
// The shared file: what is opened, what is refused and why, who is alive, and the lock of a process that died.
#include "kvpool/shared_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <fstream>
#include <functional>
#include <memory>

#include "kvpool/tests/fixture.h"

using namespace seer::kvpool;

namespace {

// The exit status of `work` in a child of its own.
int in_a_child(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status));
  return WEXITSTATUS(status);
}

void write_at(const std::string& path, uint64_t offset, const void* data, size_t bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(std::streamoff(offset));
  file.write(static_cast<const char*>(data), std::streamsize(bytes));
  CHECK(file.good());
}

void a_new_file_opens_and_says_what_it_is() {
  Folder folder;
  SharedFile::create(folder.arena(), test_config(4, 6));
  CHECK(!std::filesystem::exists(folder.arena() + ".tmp"));
  const SharedFile first(folder.arena(), false), second(folder.arena(), true);
  CHECK(first.config().dram_slots == 4 && first.config().ssd_slots == 6);
  CHECK(first.config().file_bytes == std::filesystem::file_size(folder.arena()));
  CHECK(std::string(second.config().run) == "test");
  CHECK(first.client() != second.client());
  const SharedFile::Probe probe = SharedFile::probe(folder.arena());
  CHECK(probe.config.num_entries == 10);
  CHECK((probe.live_pids == std::vector<uint32_t>{uint32_t(::getpid()), uint32_t(::getpid())}));
}

void what_is_no_file_of_this_user_alone_is_refused() {
  Folder folder;
  const auto open = [&](const std::string& path) { return [path] { SharedFile file(path, false); }; };
  CHECK(refuses(open(folder.arena()), "cannot open"));
  CHECK(refuses([&] { SharedFile::probe(folder.arena()); }, "cannot open"));
  CHECK(refuses([&] { SharedFile::create(folder.file("no/such/arena"), test_config(4, 0)); }, "cannot create"));

  SharedFile::create(folder.arena(), test_config(4, 0));
  std::filesystem::create_symlink(folder.arena(), folder.file("link"));
  CHECK(refuses(open(folder.file("link")), "cannot open"));
  CHECK(::chmod(folder.arena().c_str(), 0640) == 0);
  CHECK(refuses(open(folder.arena()), "only this user"));
  CHECK(::chmod(folder.arena().c_str(), 0600) == 0);
  open(folder.arena())();
}

void damage_to_the_configuration_is_refused(std::mt19937& rng) {
  Folder folder;
  const auto open = [&] { SharedFile file(folder.arena(), false); };
  for (int round = 0; round < 40; ++round) {
    SharedFile::create(folder.arena(), test_config(4, 2));
    Config config = SharedFile::probe(folder.arena()).config;
    const uint64_t at = rng() % (sizeof(Config) + 8);
    std::fstream file(folder.arena(), std::ios::in | std::ios::binary);
    file.seekg(std::streamoff(at));
    const uint8_t flipped = uint8_t(file.get()) ^ uint8_t(1u << rng() % 8);
    write_at(folder.arena(), at, &flipped, 1);
    CHECK(refuses(open, at < sizeof config.magic ? "not written by this version" : "is damaged"));
  }
  SharedFile::create(folder.arena(), test_config(4, 2));
  const uint64_t bytes = std::filesystem::file_size(folder.arena());
  for (const uint64_t other : {bytes - 1, bytes + 1, uint64_t{sizeof(Config) + 8}}) {
    std::filesystem::resize_file(folder.arena(), other);
    CHECK(refuses(open, "is damaged"));
  }
  std::filesystem::resize_file(folder.arena(), sizeof(Config) + 7);
  CHECK(refuses(open, "too short"));
}

void a_file_from_before_the_last_boot_is_refused() {
  Folder folder;
  SharedFile::create(folder.arena(), test_config(4, 2));
  Config config = SharedFile::probe(folder.arena()).config;
  config.boot[0] = config.boot[0] == 'x' ? 'y' : 'x';
  const uint64_t check = sum(&config, sizeof config);
  write_at(folder.arena(), 0, &config, sizeof config);
  write_at(folder.arena(), sizeof config, &check, sizeof check);
  CHECK(refuses([&] { SharedFile file(folder.arena(), false); }, "before the last boot"));
}

void one_client_too_many_is_refused_until_one_leaves() {
  Folder folder;
  SharedFile::create(folder.arena(), test_config(4, 2));
  std::vector<std::unique_ptr<SharedFile>> clients;
  for (uint32_t i = 0; i < kMaxClients; ++i) clients.push_back(std::make_unique<SharedFile>(folder.arena(), false));
  CHECK(refuses([&] { SharedFile file(folder.arena(), false); }, "clients, the most it takes"));
  clients[5].reset();
  CHECK(!clients[0]->client_alive(5));
  CHECK(SharedFile(folder.arena(), false).client() == 5);
  CHECK(SharedFile::probe(folder.arena()).live_pids.size() == kMaxClients - 1);
}

void a_client_is_alive_until_its_process_ends() {
  Folder folder;
  SharedFile::create(folder.arena(), test_config(4, 2));
  const SharedFile mine(folder.arena(), false);
  const int client = in_a_child([&] {
    const SharedFile* its = new SharedFile(folder.arena(), false);
    return mine.client_alive(its->client()) ? int(its->client()) : 99;
  });
  CHECK(client == 1);
  CHECK(mine.client_alive(0) && !mine.client_alive(1));
}

void a_forked_child_must_open_its_own() {
  Folder folder;
  SharedFile::create(folder.arena(), test_config(4, 2));
  const SharedFile mine(folder.arena(), false);
  mine.check_process();
  CHECK(in_a_child(
            [&] { return refuses([&] { mine.check_process(); }, "a forked child must open its own") ? 0 : 1; }) == 0);
}

void the_lock_of_a_dead_process_comes_with_a_warning() {
  Folder folder;
  SharedFile::create(folder.arena(), test_config(4, 2));
  SharedFile mine(folder.arena(), false), other(folder.arena(), false);
  CHECK(mine.lock(Deadline::after(kDeadline_s)));
  CHECK(refuses([&] { other.lock(Deadline::after(0)); }, "lock was not given"));
  mine.unlock();
  CHECK(in_a_child(
            [&] { return (new SharedFile(folder.arena(), false))->lock(Deadline::after(kDeadline_s)) ? 0 : 1; }) == 0);
  CHECK(!mine.lock(Deadline::after(kDeadline_s)));
  mine.lock_is_consistent();
  mine.unlock();
  CHECK(other.lock(Deadline::after(kDeadline_s)));
  other.unlock();
}

void one_keeper_at_a_time() {
  Folder folder;
  SharedFile::create(folder.arena(), test_config(4, 2));
  auto first = std::make_unique<SharedFile>(folder.arena(), false);
  SharedFile second(folder.arena(), false);
  CHECK(first->become_keeper() && first->become_keeper());
  CHECK(!second.become_keeper());
  first.reset();
  CHECK(second.become_keeper());
}

void a_bell_that_has_rung_is_not_waited_for() {
  std::atomic<uint32_t> bell{3};
  SharedFile::ring(bell);
  CHECK(bell == 4);
  SharedFile::wait(bell, 3, 1e6);
  SharedFile::wait(bell, 4, 0);
}

void a_slab_of_another_arena_is_refused() {
  Folder folder;
  const auto open = [&] { Arena arena(folder.arena(), folder.slab(), kDeadline_s, false); };
  Arena::create(folder.arena(), folder.slab(), test_config(4, 6));
  open();
  CHECK(std::filesystem::file_size(folder.slab()) == kPage + 6 * test_config(4, 6).stride_bytes);
  write_at(folder.slab(), 3, "?", 1);
  CHECK(refuses(open, "does not belong"));
  write_at(folder.slab(), 3, "3", 1);
  open();
  CHECK(::chmod(folder.slab().c_str(), 0604) == 0);
  CHECK(refuses(open, "does not belong"));
  CHECK(::chmod(folder.slab().c_str(), 0600) == 0);
  std::filesystem::resize_file(folder.slab(), 100);
  CHECK(refuses(open, "does not belong"));
  std::filesystem::remove(folder.slab());
  CHECK(refuses(open, "cannot open SSD file"));

  // An arena that cannot be made leaves no slab behind.
  CHECK(refuses([&] { Arena::create(folder.file("no/arena"), folder.slab(), test_config(4, 6)); },
                "cannot create arena"));
  CHECK(!std::filesystem::exists(folder.slab()));
  CHECK(refuses([&] { Arena::create(folder.arena(), folder.file("no/slab"), test_config(4, 6)); }, "SSD file"));
}

}  // namespace

int main() {
  std::mt19937 rng(static_cast<unsigned>(seer::testing::seed()));
  a_new_file_opens_and_says_what_it_is();
  what_is_no_file_of_this_user_alone_is_refused();
  damage_to_the_configuration_is_refused(rng);
  a_file_from_before_the_last_boot_is_refused();
  one_client_too_many_is_refused_until_one_leaves();
  a_client_is_alive_until_its_process_ends();
  a_forked_child_must_open_its_own();
  the_lock_of_a_dead_process_comes_with_a_warning();
  one_keeper_at_a_time();
  a_bell_that_has_rung_is_not_waited_for();
  a_slab_of_another_arena_is_refused();
  return seer::testing::passed("shared_file");
}
