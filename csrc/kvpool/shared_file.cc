// SPDX-License-Identifier: Apache-2.0
#include "shared_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <fstream>
#include <new>
#include <utility>

namespace seer::kvpool {
namespace {

constexpr off_t kClientBase = off_t{1} << 60;
constexpr off_t kKeeperByte = kClientBase - 1;

[[noreturn]] void fail(const std::string& what, int error) { throw PoolFailure{what + ": " + std::strerror(error)}; }

uint64_t config_check(const Config& config) { return sum(&config, sizeof config); }

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

struct flock one_byte(off_t at, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = at;
  lock.l_len = 1;
  return lock;
}

bool byte_held(int fd, off_t at) {
  struct flock lock = one_byte(at, F_WRLCK);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

struct File {  // closes what it opened unless it is taken
  int fd;
  ~File() {
    if (fd >= 0) ::close(fd);
  }
  int take() { return std::exchange(fd, -1); }
};

File open_own(const std::string& path) {
  File file{::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW)};
  if (file.fd < 0) fail("cannot open arena " + path, errno);
  struct stat status;
  if (fstat(file.fd, &status)) fail("cannot stat arena " + path, errno);
  if (!S_ISREG(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & 077))
    throw PoolFailure{"arena " + path + " is not a file that only this user can read and write"};
  return file;
}

Config read_config(int fd, const std::string& path) {
  // Only the leading fields are read: a damaged file must not be trusted for anything else.
  struct {
    Config config;
    uint64_t check;
  } start;
  static_assert(offsetof(Header, config_check) == sizeof(Config));
  struct stat status;
  if (::pread(fd, &start, sizeof start, 0) != ssize_t(sizeof start) || fstat(fd, &status))
    throw PoolFailure{"arena " + path + " is too short to be one"};
  if (std::memcmp(start.config.magic, kMagic, sizeof kMagic))
    throw PoolFailure{"arena " + path + " was not written by this version"};
  if (start.check != config_check(start.config) || uint64_t(status.st_size) != start.config.file_bytes ||
      Sections(start.config).end != start.config.file_bytes)
    throw PoolFailure{"arena " + path + " is damaged: its header does not match its check"};
  return start.config;
}

}  // namespace

double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

Deadline Deadline::after(double seconds) {
  const double end = now_s() + seconds;
  Deadline deadline;
  deadline.at.tv_sec = time_t(end);
  deadline.at.tv_nsec = long((end - double(deadline.at.tv_sec)) * 1e9);
  return deadline;
}

double Deadline::left_s() const { return double(at.tv_sec) + 1e-9 * double(at.tv_nsec) - now_s(); }

void SharedFile::create(const std::string& path, Config config) {
  std::memcpy(config.magic, kMagic, sizeof kMagic);
  std::strncpy(config.boot, boot_id().c_str(), sizeof config.boot - 1);
  config.file_bytes = Sections(config).end;

  const std::string temporary = path + ".tmp";
  ::unlink(temporary.c_str());
  File file{::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
  if (file.fd < 0) fail("cannot create arena " + temporary, errno);
  // Allocating every page now turns "out of memory" into an error here, instead of a SIGBUS in the middle of a put.
  if (const int error = posix_fallocate(file.fd, 0, off_t(config.file_bytes))) {
    ::unlink(temporary.c_str());
    fail("cannot reserve " + std::to_string(config.file_bytes) + " bytes for arena " + path, error);
  }
  void* memory = mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  if (memory == MAP_FAILED) fail("cannot map arena " + path, errno);
  auto* header = static_cast<Header*>(memory);
  header->config = config;
  header->config_check = config_check(config);

  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error = pthread_mutex_init(&header->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  munmap(memory, sizeof(Header));
  if (error) fail("cannot make the lock of arena " + path, error);
  // Every entry is all zeros: an invalid check, hence free. The first client rebuilds the derived parts.
  if (::rename(temporary.c_str(), path.c_str())) fail("cannot name arena " + path, errno);
}

SharedFile::Probe SharedFile::probe(const std::string& path) {
  File file = open_own(path);
  Probe probe;
  probe.config = read_config(file.fd, path);
  Header* header;
  void* memory = mmap(nullptr, sizeof(Header), PROT_READ, MAP_SHARED, file.fd, 0);
  if (memory == MAP_FAILED) fail("cannot map arena " + path, errno);
  header = static_cast<Header*>(memory);
  for (uint32_t i = 0; i < kMaxClients; ++i)
    if (byte_held(file.fd, kClientBase + i)) probe.live_pids.push_back(header->clients[i].pid);
  munmap(memory, sizeof(Header));
  return probe;
}

SharedFile::SharedFile(const std::string& path, bool populate) {
  File file = open_own(path);
  config_ = read_config(file.fd, path);
  if (boot_id() != config_.boot) throw PoolFailure{"arena " + path + " is from before the last boot"};

  for (uint32_t i = 0; i < kMaxClients && client_ == kNone; ++i) {
    struct flock lock = one_byte(kClientBase + i, F_WRLCK);
    if (fcntl(file.fd, F_OFD_SETLK, &lock) == 0) client_ = i;
  }
  if (client_ == kNone)
    throw PoolFailure{"arena " + path + " has " + std::to_string(kMaxClients) + " clients, the most it takes"};

  void* memory = mmap(nullptr, config_.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  if (memory == MAP_FAILED) fail("cannot map arena " + path, errno);
  base_ = static_cast<uint8_t*>(memory);
#ifdef MADV_POPULATE_WRITE
  // Page faults on first touch cost a put several times its copy; pay for them once, at attach. An older kernel
  // refuses this, and then faults come one by one.
  if (populate) madvise(base_, config_.file_bytes, MADV_POPULATE_WRITE);
#else
  (void)populate;
#endif
  pid_ = getpid();
  header()->clients[client_] = Client{uint32_t(pid_), 1};
  fd_ = file.take();
}

SharedFile::~SharedFile() {
  if (getpid() == pid_) header()->clients[client_] = Client{0, 0};
  munmap(base_, config_.file_bytes);
  ::close(fd_);  // the last descriptor of this description: its byte locks go with it
}

bool SharedFile::client_alive(uint32_t client) const {
  return client == client_ || byte_held(fd_, kClientBase + client);
}

bool SharedFile::lock(const Deadline& deadline) {
  const int error = pthread_mutex_clocklock(&header()->mutex, CLOCK_MONOTONIC, &deadline.at);
  if (error == 0) return true;
  if (error == EOWNERDEAD) return false;
  fail("the arena's lock was not given", error);
}

void SharedFile::lock_is_consistent() { pthread_mutex_consistent(&header()->mutex); }

void SharedFile::unlock() { pthread_mutex_unlock(&header()->mutex); }

void SharedFile::wait(std::atomic<uint32_t>& bell, uint32_t seen, double seconds) {
  if (seconds <= 0) return;
  timespec span;
  span.tv_sec = time_t(seconds);
  span.tv_nsec = long((seconds - double(span.tv_sec)) * 1e9);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell), FUTEX_WAIT, seen, &span, nullptr, 0);
}

void SharedFile::ring(std::atomic<uint32_t>& bell) {
  bell.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

bool SharedFile::become_keeper() {
  struct flock lock = one_byte(kKeeperByte, F_WRLCK);
  return fcntl(fd_, F_OFD_SETLK, &lock) == 0;  // granted again to the one that has it
}

void SharedFile::check_process() const {
  if (getpid() != pid_)
    throw PoolFailure{"this pool was opened by process " + std::to_string(pid_) + "; a forked child must open its own"};
}

}  // namespace seer::kvpool
