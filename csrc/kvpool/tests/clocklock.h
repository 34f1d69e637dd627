// SPDX-License-Identifier: Apache-2.0
// The thread sanitizer of GCC 12 does not know pthread_mutex_clocklock, with which the arena is locked, and takes all
// that the lock protects for races. This stands in front of it and reports what it did.
#pragma once

#ifdef __SANITIZE_THREAD__
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sanitizer/tsan_interface.h>
#include <time.h>

extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until) noexcept {
  using Lock = int (*)(pthread_mutex_t*, clockid_t, const timespec*);
  static const Lock lock = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_clocklock"));
  __tsan_mutex_pre_lock(mutex, __tsan_mutex_not_static);
  const int error = lock(mutex, clock, until);
  const bool locked = error == 0 || error == EOWNERDEAD;
  __tsan_mutex_post_lock(mutex, __tsan_mutex_not_static | (locked ? 0 : __tsan_mutex_try_lock_failed), 1);
  return error;
}
#endif
