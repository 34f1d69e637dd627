# SPDX-License-Identifier: Apache-2.0
"""Move KV or compute it again: which is faster?

A chunk placed on an instance that lacks part of its prefix can load the missing blocks from the pool or prefill them.
Moving costs a fixed delay plus bytes over bandwidth. Computing costs a prefill of that many tokens after that prefix.
Instances measure both; this module fits costs to the measurements and compares them.

No clock and no I/O. Costs are estimates in seconds. At equal cost KV is moved, which leaves compute to other requests.

Invariants
  1. The blocks moved are always the leading ones of the gap: prefill can only continue a prefix.
  2. The cost of the decision is never above that of moving everything or of computing everything.
  3. Blocks the pool does not hold are computed, whatever they cost.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Sequence

import msgspec

from seer.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """Time to bring bytes from the pool to an instance."""

    latency_s: float
    """Fixed delay of a transfer, however small."""

    bandwidth_bytes_s: float
    """Bytes per second once it runs."""

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_s <= 0 or self.latency_s < 0:
            raise ConfigError(
                f"move cost of {self.latency_s} s and {self.bandwidth_bytes_s} bytes/s is impossible",
                hint="measure it with `seer bench pool`",
            )

    def seconds(self, num_bytes: int) -> float:
        """Time to move this many bytes; none take no time."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_s if num_bytes > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCost:
    """Time to compute the KV of tokens: a fixed part, a part per token, and attention to earlier tokens."""

    fixed_s: float
    """Cost of a prefill step as such."""

    per_token_s: float
    """Cost of a token regardless of its position."""

    per_token_pair_s: float = 0.0
    """Cost of one token attending to one earlier token; it makes late tokens cost more."""

    def __post_init__(self) -> None:
        if min(self.fixed_s, self.per_token_s, self.per_token_pair_s) < 0:
            raise ConfigError(f"prefill cost {self} has a negative part")

    def seconds(self, first_token: int, num_tokens: int) -> float:
        """Time to prefill tokens `first_token .. first_token + num_tokens`."""
        if num_tokens <= 0:
            return 0.0
        pairs = num_tokens * first_token + num_tokens * (num_tokens - 1) / 2
        return self.fixed_s + self.per_token_s * num_tokens + self.per_token_pair_s * pairs


class Gap(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The part of a request's prefix that an instance does not hold."""

    first_token: int
    """Tokens the instance holds already."""

    num_tokens: int
    """Tokens it lacks."""

    num_pooled_tokens: int
    """Of these, how many leading ones the pool holds."""

    bytes_per_token: int
    """KV bytes of a token."""

    block_size: int
    """Tokens per block: what is moved is whole blocks."""

    num_near_tokens: int = 0
    """Of the pooled ones, how many leading ones the instance's own node holds."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """How to fill a gap: move the leading tokens, compute the rest."""

    move_tokens: int
    compute_tokens: int
    seconds: float


def plan_transfer(gap: Gap, move: MoveCost, prefill: PrefillCost, near_move: MoveCost | None = None) -> Transfer:
    """Choose between computing all of the gap and moving what the pool holds of it, near parts at `near_move`.

    With one cost of moving, no split in between can be better: in the number of moved tokens, moving costs a linear
    amount and computing the rest a concave one (late tokens cost most), so the minimum is at one of the two ends.
    """
    pooled = min(gap.num_pooled_tokens, gap.num_tokens)
    pooled -= pooled % gap.block_size
    compute_all = Transfer(0, gap.num_tokens, prefill.seconds(gap.first_token, gap.num_tokens))
    if pooled <= 0:
        return compute_all
    rest = gap.num_tokens - pooled
    near = min(gap.num_near_tokens, pooled)
    seconds = (near_move or move).seconds(near * gap.bytes_per_token)
    seconds += move.seconds((pooled - near) * gap.bytes_per_token)
    seconds += prefill.seconds(gap.first_token + pooled, rest)
    move_pooled = Transfer(pooled, rest, seconds)
    return move_pooled if move_pooled.seconds <= compute_all.seconds else compute_all


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransferCosts:
    """What moving and computing a request's KV cost on this fleet.

    The defaults are guesses that favour moving, as the paper does: a bandwidth between main memory's and a network's,
    and a prefill slower than on the largest GPUs. Measured costs replace them.
    """

    move: MoveCost = MoveCost(latency_s=1e-3, bandwidth_bytes_s=3e9)
    near_move: MoveCost | None = None
    """Inside a node, where instances are on several; None: as `move`."""
    prefill: PrefillCost = PrefillCost(fixed_s=0.0, per_token_s=1e-4)
    bytes_per_token: int = 64 << 10
    """KV bytes of a token: those of an 8B model with grouped-query attention, unless stated."""
    prefetch_tokens: int = 0
    """Tokens whose KV may come from the pool's SSD tier to DRAM before their requests run; 0 without such a tier."""


class TransferEstimate:
    """The newest costs: the given ones until enough is measured of both.

    The given ones favour moving. A measured cost beside a guessed one would compare nothing: a CPU prefills a hundred
    times slower than the guess, so its first measured moves would look dear.
    """

    MOVES_KEPT = 64
    """Transfers in the fit: only recent ones, because the load on the memory's bandwidth changes."""
    MIN_MOVES = 4
    """Fewer transfers would let a single slow one set the cost."""
    MIN_PREFILL_TOKENS = 256
    """Fewer tokens would mostly measure a step's fixed cost."""
    PREFILL_DECAY = 0.9
    """Weight kept by earlier reports at each new one: prefill speed changes with the batch."""
    FORGET_AFTER = 64
    """Prefill reports without a move after which the given cost of moving counts again. Otherwise a few slow moves
    would stop all moves, and with them the measurements that could correct the cost."""

    def __init__(self, costs: TransferCosts | None = None) -> None:
        self.costs = costs or TransferCosts()
        self.given = self.costs
        """Before anything was measured."""
        self._num_unmoved = 0
        self._moves = _Moves(self.MOVES_KEPT, self.MIN_MOVES)
        self._near_moves = _Moves(self.MOVES_KEPT, self.MIN_MOVES)
        self._prefill_tokens = self._prefill_s = 0.0
        self._prefill: PrefillCost | None = None

    def saw_move(self, num_bytes: int, seconds: float) -> None:
        """`num_bytes` came from the pool in `seconds`; where instances are on several nodes, from another one."""
        self._saw(self._moves, num_bytes, seconds)

    def saw_near_move(self, num_bytes: int, seconds: float) -> None:
        """`num_bytes` came from the memory of the instance's own node in `seconds`."""
        self._saw(self._near_moves, num_bytes, seconds)

    def _saw(self, moves: _Moves, num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0 or seconds <= 0:
            return
        self._num_unmoved = 0
        moves.add(num_bytes, seconds)
        self._compare()

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens` were prefilled in `seconds`."""
        if num_tokens <= 0 or seconds <= 0:
            return
        self._prefill_tokens = self._prefill_tokens * self.PREFILL_DECAY + num_tokens
        self._prefill_s = self._prefill_s * self.PREFILL_DECAY + seconds
        if self._prefill_tokens >= self.MIN_PREFILL_TOKENS:
            self._prefill = PrefillCost(fixed_s=0.0, per_token_s=self._prefill_s / self._prefill_tokens)
        self._num_unmoved += 1
        if self._num_unmoved == self.FORGET_AFTER:
            self._moves.forget(self.given.move)
            self._near_moves.forget(self.given.near_move)
        self._compare()

    def _compare(self) -> None:
        near = self._near_moves.cost
        far = self._moves.cost or near  # until one is seen, a move between nodes is hoped to be as fast
        if far is not None and self._prefill is not None:
            near = near or self.given.near_move
            self.costs = dataclasses.replace(self.costs, move=far, near_move=near, prefill=self._prefill)


class _Moves:
    """The recent transfers of one kind, and the cost fitted to them."""

    def __init__(self, num_kept: int, num_needed: int) -> None:
        self.cost: MoveCost | None = None
        """None until enough were seen."""
        self._seen: deque[tuple[int, float]] = deque(maxlen=num_kept)
        self._num_needed = num_needed

    def add(self, num_bytes: int, seconds: float) -> None:
        """One more transfer."""
        self._seen.append((num_bytes, seconds))
        sizes, times_s = [size for size, _ in self._seen], [time_s for _, time_s in self._seen]
        if len(sizes) < self._num_needed:
            return
        if len(set(sizes)) < 2:
            self.cost = MoveCost(latency_s=0.0, bandwidth_bytes_s=sum(sizes) / sum(times_s))
        else:
            self.cost = fit_move_cost(sizes, times_s)

    def forget(self, cost: MoveCost | None) -> None:
        """Begin again with this cost."""
        self._seen.clear()
        self.cost = cost


def fit_move_cost(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> MoveCost:
    """Delay and bandwidth from measured transfers: the line through the medians of the smaller and larger half."""
    if len(sizes_bytes) != len(seconds) or len(set(sizes_bytes)) < 2:
        raise ConfigError(f"{len(set(sizes_bytes))} transfer sizes were measured, at least 2 are needed")
    points = sorted(zip(sizes_bytes, seconds, strict=True))
    middle = bisect.bisect_left(points, (points[len(points) // 2][0], 0.0)) or len(points) // 2
    (small, small_s), (large, large_s) = _median(points[:middle]), _median(points[middle:])
    if large <= small or large_s <= small_s:  # noise hid the slope: charge everything to bandwidth
        return MoveCost(latency_s=0.0, bandwidth_bytes_s=large / max(large_s, 1e-9))
    bandwidth = (large - small) / (large_s - small_s)
    latency_s = small_s - small / bandwidth
    if latency_s < 0:  # sizes too close for the noise: the slope says more than was ever measured
        return MoveCost(latency_s=0.0, bandwidth_bytes_s=(small + large) / (small_s + large_s))
    return MoveCost(latency_s=latency_s, bandwidth_bytes_s=bandwidth)


def _median(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    sizes, times = sorted(p[0] for p in points), sorted(p[1] for p in points)
    return sizes[len(sizes) // 2], times[len(times) // 2]
