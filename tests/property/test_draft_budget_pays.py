"""Speculation is never slower than off, and close to the best fixed depth, whatever steps cost and drafts are worth.

The budget that ships, from a cold start, against steps whose cost is a function: of a GPU where rows are all but free
and drafting costs the host its time by the request, of a CPU where every row costs, of something between, and of one
whose rows are free up to a limit. What the budget is told is off by up to a tenth, and the first step of every shape
stalls. What it earns is counted without noise, in tokens as they are expected, so each run has one answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import pytest

pytest.importorskip("seer.drafting._index")

from seer.engine.drafter import StepReport
from seer.engine.host.drafts import MeasuredBudget
from seer.speculation.acceptance import AcceptanceTracker
from seer.speculation.budget import MAX_DEPTH

NUM_STEPS = 1_500
NOISE = 0.1
STALL_MS = 300.0
CAPTURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 10)

StepMs = Callable[[int, int, bool], float]
"""By requests, rows of each, and whether the drafter was asked."""


def gpu_ms(batch: int, rows: int, drafting: bool) -> float:
    """Fitted to an H200: 2.0, 2.1 and 2.3 ms at batch 1, 8 and 64 without drafts, 2.4, 3.2 and 7 ms with."""
    if not drafting:
        return 2.0 + 0.005 * batch
    padded = next(size for size in CAPTURED_ROWS if size >= rows)
    return 2.35 + 0.08 * batch + 0.0006 * batch * padded


def mended_gpu_ms(batch: int, rows: int, drafting: bool) -> float:
    """The same with a fifth of the host's time."""
    if not drafting:
        return 2.0 + 0.005 * batch
    padded = next(size for size in CAPTURED_ROWS if size >= rows)
    return 2.3 + 0.02 * batch + 0.002 * batch * padded


def middle_ms(batch: int, rows: int, drafting: bool) -> float:
    return 5.0 + 0.15 * batch * rows + 0.3 * drafting


def cpu_ms(batch: int, rows: int, drafting: bool) -> float:
    return 12.0 + 4.0 * batch * rows + 0.05 * batch * drafting


def kinked_ms(batch: int, rows: int, drafting: bool) -> float:
    return 3.0 + 0.05 * max(0, batch * rows - 64) + 0.4 * drafting


def slow_ms(batch: int, rows: int, drafting: bool) -> float:
    return 20.0 + 0.05 * batch * rows + (0.5 + 0.03 * batch) * drafting


COSTS: dict[str, tuple[StepMs, int]] = {
    "gpu": (gpu_ms, 8),
    "gpu, host mended": (mended_gpu_ms, 8),
    "middle": (middle_ms, 1),
    "cpu": (cpu_ms, 1),
    "kinked": (kinked_ms, 8),
}
"""With the steps of one burst where nothing is drafted."""


@dataclass(slots=True)
class Drafts:
    """All a budget wants to know of a drafter; each draft token is accepted with one probability, if it is there."""

    accepted: float
    """Of the tokens that follow accepted ones."""
    offered: float
    """Of the requests that are allowed a draft, how many get one."""
    acceptance: AcceptanceTracker
    mode: str = "grouped"

    def expected_tokens(self, depth: int) -> float:
        return 1.0 + self.offered * sum(self.accepted**i for i in range(1, depth + 1))

    def expected_ms(self, step_ms: StepMs, batch: int, depth: int) -> float:
        none = (1.0 - self.offered) ** batch if depth else 1.0
        return none * step_ms(batch, 1, depth > 0) + (1.0 - none) * step_ms(batch, 1 + depth, depth > 0)

    def best(self, step_ms: StepMs, batch: int) -> float:
        """Tokens per ms of the best fixed depth."""
        return max(self.earned(step_ms, batch, depth) for depth in range(MAX_DEPTH + 1))

    def earned(self, step_ms: StepMs, batch: int, depth: int) -> float:
        return batch * self.expected_tokens(depth) / self.expected_ms(step_ms, batch, depth)

    def length(self, depth: int, rng: random.Random) -> int:
        return depth if rng.random() < self.offered else 0

    def num_accepted(self, length: int, rng: random.Random) -> int:
        count = 0
        while count < length and rng.random() < self.accepted:
            count += 1
        return count


def tokens_per_ms(
    cost: tuple[StepMs, int],
    batch: int,
    drafts: Drafts,
    budget: MeasuredBudget,
    *,
    num_steps: int = NUM_STEPS,
    seed: int = 1,
) -> float:
    """What a run by the budget earns."""
    step_ms, burst = cost
    rng = random.Random(seed)
    shapes: set[tuple[int, bool]] = set()
    made, tokens, spent_ms = 0, 0.0, 0.0
    while made < num_steps:
        depth = budget(batch, 100).max_tokens
        lengths = [drafts.length(depth, rng) for _ in range(batch)]
        count = 1 if depth else burst
        for length in lengths if depth else ():
            drafts.acceptance.observe(depth, range(drafts.num_accepted(length, rng)))
        shape = (1 + max(lengths), depth > 0)
        stall_ms = STALL_MS if shape not in shapes else 0.0
        shapes.add(shape)
        told_ms = step_ms(batch, *shape) * (1.0 + rng.uniform(-NOISE, NOISE)) + stall_ms / count
        budget.on_step(
            StepReport(
                duration_s=told_ms / 1e3,
                num_steps=count,
                num_running=batch,
                num_rows=batch + sum(lengths),
                num_prefill_rows=0,
                mean_context_tokens=100,
                num_emitted=batch * count,
                num_drafted=sum(lengths),
                num_accepted=0,
                num_allowed=depth,
            )
        )
        made += count
        spent_ms += count * drafts.expected_ms(step_ms, batch, depth)
        tokens += count * batch * drafts.expected_tokens(depth)
    return tokens / spent_ms


def a_budget(drafts: Drafts, only_depth: int | None = None) -> MeasuredBudget:
    return MeasuredBudget(drafts, only_depth=only_depth)  # type: ignore[arg-type]


@pytest.mark.parametrize("offered", [1.0, 0.4])
@pytest.mark.parametrize("accepted", [0.3, 0.75])
@pytest.mark.parametrize("batch", [1, 8, 32, 64])
@pytest.mark.parametrize("machine", COSTS)
def test_the_budget_earns_what_the_best_depth_does_and_never_less_than_no_drafts(
    machine: str, batch: int, accepted: float, offered: float
) -> None:
    cost = COSTS[machine]
    earned = []
    for seed in range(3):
        drafts = Drafts(accepted, offered, AcceptanceTracker())
        earned.append(tokens_per_ms(cost, batch, drafts, a_budget(drafts), seed=seed))
    best, plain = drafts.best(cost[0], batch), drafts.earned(cost[0], batch, 0)
    # Seen: 0.947 and more of the best; 0.985 and more of no drafts, the least where the best gains a few hundredths.
    assert fmean(earned) >= 0.93 * best
    assert fmean(earned) >= 0.975 * plain


@pytest.mark.parametrize("batch", [1, 4, 16, 48])
def test_a_depth_whose_first_step_stalled_is_used_all_the_same(batch: int) -> None:
    """Of a large model, where a step takes long and drafts are all but free, the deepest pay four times over."""
    drafts = Drafts(0.85, 0.8, AcceptanceTracker())
    earned = tokens_per_ms((slow_ms, 1), batch, drafts, a_budget(drafts))
    assert earned >= 0.95 * drafts.best(slow_ms, batch)


def test_drafts_that_paid_for_nobody_in_a_crowd_pay_for_the_few_that_are_left() -> None:
    """What 64 requests measured must not keep the tail from drafting."""
    drafts = Drafts(0.75, 0.9, AcceptanceTracker())
    budget = a_budget(drafts)
    costs = COSTS["middle"]
    for batch in (64, 48, 32, 16):
        tokens_per_ms(costs, batch, drafts, budget, num_steps=150)
    for batch in (8, 4, 2, 1):
        assert tokens_per_ms(costs, batch, drafts, budget, num_steps=300) >= 0.9 * drafts.best(costs[0], batch)


def test_drafts_that_become_good_are_noticed_and_ones_that_become_bad_are_dropped() -> None:
    costs, batch = COSTS["middle"], 8
    for before, after in ((0.05, 0.85), (0.85, 0.05)):
        drafts = Drafts(before, 1.0, AcceptanceTracker())
        budget = a_budget(drafts)
        tokens_per_ms(costs, batch, drafts, budget, num_steps=600)
        drafts.accepted = after
        tokens_per_ms(costs, batch, drafts, budget, num_steps=600)
        assert tokens_per_ms(costs, batch, drafts, budget, num_steps=600) >= 0.95 * drafts.best(costs[0], batch)


def test_one_depth_alone_is_drafted_where_it_pays_and_not_where_it_does_not() -> None:
    for machine, pays in (("gpu", True), ("cpu", False)):
        drafts = Drafts(0.75, 1.0, AcceptanceTracker())
        budget = a_budget(drafts, only_depth=5)
        tokens_per_ms(COSTS[machine], 8, drafts, budget, num_steps=400)
        asked = [budget(8, 100).max_tokens for _ in range(50)]
        assert set(asked) <= {0, 5}
        assert (asked.count(5) > 40) is pays
