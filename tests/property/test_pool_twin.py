# SPDX-License-Identifier: Apache-2.0
"""Random operations on the local pool, against a dictionary that never forgets what it must remember.

Two sizes: one where everything fits, so the pool must equal the dictionary; and one where little fits, so the
pool may have evicted blocks that no owner pinned, and nothing else. After every operation the index checks its
own invariants.
"""

from __future__ import annotations

import tempfile
import uuid

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig

BLOCK_BYTES = 4096
NUM_NAMES = 24
NAMES = st.lists(st.integers(0, NUM_NAMES - 1), min_size=1, max_size=8)
REQUESTS = st.sampled_from(["a", "b", "c"])


def key_of(name: int) -> bytes:
    """Even names are of weights version 1, odd ones of 2; drops move to 3, 4, ... through `generation`."""
    return bytes([name % 2 + 1]) + bytes(7) + bytes([name]) * 24


def block_of(name: int) -> np.ndarray:
    return np.random.default_rng(name).integers(0, 256, BLOCK_BYTES - 64 * (name % 3), dtype=np.uint8)


class Twin(RuleBasedStateMachine):
    """The pool, and what it must hold."""

    dram_blocks = 8
    ssd_blocks = 40
    lossless = True

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.config = LocalPoolConfig(
            block_bytes=BLOCK_BYTES,
            dram_bytes=self.dram_blocks * BLOCK_BYTES,
            ssd_bytes=self.ssd_blocks * BLOCK_BYTES,
            ssd_dir=self.folder.name if self.ssd_blocks else "",
            dram_dir=self.folder.name,
            name=uuid.uuid4().hex,
            keeper=False,  # every step in this thread, so that a failing example replays
            populate=False,
        )
        self.pool = LocalPool(self.config)
        self.held: set[int] = set()
        self.pins: dict[str, set[int]] = {}
        self.dropped: set[int] = set()

    @property
    def arena(self):  # type: ignore[no-untyped-def]
        return self.pool._open_arena()

    @property
    def pinned(self) -> set[int]:
        return set().union(*self.pins.values()) if self.pins else set()

    def keys(self, names: list[int]) -> list[bytes]:
        return [key_of(n) for n in names]

    def forget_evicted(self) -> None:
        """In a lossy pool, take over what it evicted; a pinned block must never be among it."""
        missing = {n for n in self.held if not self.pool.lookup_now([key_of(n)])}
        if self.lossless:
            assert not missing, f"held blocks are gone: {missing}"
        assert not missing & self.pinned, f"pinned blocks are gone: {missing & self.pinned}"
        self.held -= missing

    @rule(names=NAMES, request=st.none() | REQUESTS)
    def put(self, names: list[int], request: str | None) -> None:
        done = self.pool.put_now(self.keys(names), [block_of(n) for n in names], request)
        for name, held in zip(names, done, strict=True):
            if name % 2 + 1 in self.dropped:
                assert not held
                continue
            assert held or not self.lossless
            if held:
                self.held.add(name)
                if request:
                    self.pins.setdefault(request, set()).add(name)
        self.forget_evicted()

    @rule(names=NAMES)
    def get(self, names: list[int]) -> None:
        expected = [block_of(n) for n in names]
        out = [np.zeros_like(b) for b in expected]
        for name, want, got, hit in zip(names, expected, out, self.pool.get_now(self.keys(names), out), strict=True):
            assert hit == (name in self.held)
            if hit:
                assert np.array_equal(want, got)

    @rule(names=NAMES)
    def lookup(self, names: list[int]) -> None:
        leading = next((i for i, n in enumerate(names) if n not in self.held), len(names))
        assert self.pool.lookup_now(self.keys(names)) == leading

    @rule(request=REQUESTS, names=NAMES)
    def pin(self, request: str, names: list[int]) -> None:
        leading = next((i for i, n in enumerate(names) if n not in self.held), len(names))
        assert self.pool.pin(request, self.keys(names)) == leading
        self.pins.setdefault(request, set()).update(names[:leading])

    @rule(request=REQUESTS)
    def release(self, request: str) -> None:
        assert self.pool.release(request) == len(self.pins.pop(request, set()))

    @rule(request=REQUESTS)
    def free(self, request: str) -> None:
        mine = self.pins.pop(request, set())
        gone = mine - self.pinned
        assert self.pool.free(request) == len(gone)
        self.held -= gone

    @rule(weights_version=st.integers(1, 2))
    @precondition(lambda self: not self.dropped)
    def drop_weights_version(self, weights_version: int) -> None:
        gone = {n for n in self.held if n % 2 + 1 == weights_version}
        assert self.pool.drop_weights_version(weights_version) == len(gone)
        self.dropped.add(weights_version)
        self.held -= gone
        self.pins = {r: names - gone for r, names in self.pins.items()}

    @rule(num=st.integers(1, 12))
    def spill(self, num: int) -> None:
        self.arena.spill(num, False)

    @rule(names=NAMES)
    def promote(self, names: list[int]) -> None:
        self.arena.promote(np.frombuffer(b"".join(self.keys(names)), np.uint8))

    @rule()
    def rebuild(self) -> None:
        self.arena.rebuild()

    @rule()
    def reopen(self) -> None:
        self.pool.close()
        self.pool = LocalPool(self.config)
        assert not self.pool.created

    @invariant()
    def index_is_sound(self) -> None:
        assert self.arena.problems() == []
        stats = self.pool.stats()
        assert stats.num_blocks == len(self.held)
        assert stats.num_pinned_blocks == len(self.pinned)
        assert stats.num_corrupt == stats.num_repaired == stats.num_failed == 0

    def teardown(self) -> None:
        self.pool.close(remove=True)
        self.folder.cleanup()


class SmallTwin(Twin):
    """Little fits."""

    dram_blocks = 4
    ssd_blocks = 6
    lossless = False


class DramOnlyTwin(Twin):
    """No SSD tier."""

    dram_blocks = 6
    ssd_blocks = 0
    lossless = False


COMMON = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestTwin = Twin.TestCase
TestSmallTwin = SmallTwin.TestCase
TestDramOnlyTwin = DramOnlyTwin.TestCase
TestTwin.settings = TestSmallTwin.settings = TestDramOnlyTwin.settings = COMMON
