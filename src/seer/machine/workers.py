# SPDX-License-Identifier: Apache-2.0
"""A pool of worker processes that ends with this process, however this process ends.

The workers of `concurrent.futures` wait for one another's pipes, so they outlive a process that is killed. Ours ask the
kernel to be killed with it. An exception in this process, such as Ctrl-C, kills them at once: it does not wait for the
tasks in progress.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from seer.machine.parent_death import end_with_parent

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def worker_processes(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """An executor with this number of processes."""
    others = set(multiprocessing.active_children())
    fork = multiprocessing.get_context("fork")  # the kernel ends a worker with the process that forked it
    pool = ProcessPoolExecutor(num_processes, fork, initializer=_become_worker, initargs=(os.getpid(),))
    try:
        # The first task starts all workers. Python drops an exception of a signal handler that runs inside a fork.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            pool.submit(_do_nothing)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        yield pool
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _do_nothing() -> None:
    pass


def _become_worker(parent: int) -> None:
    end_with_parent()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handlers are not for this process
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
