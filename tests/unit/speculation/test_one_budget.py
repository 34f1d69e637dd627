# SPDX-License-Identifier: Apache-2.0
"""One function decides how much is drafted, in engines and simulator: read from the imports of all modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import seer
from seer.drafting import live_budget
from seer.engine.vllm.gpu_drafts import depth
from seer.sim import speculation
from seer.speculation import budget

SOURCE = Path(seer.__file__).parent
DECISIONS = {"best_depth", "share_out", "tokens_per_s", "step_with_drafts_s"}
RULES = {f"seer.speculation.{rule}.{rule}" for rule in ("seer", "paper", "threshold")}


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def importers(*names: str) -> set[str]:
    """Modules outside seer.speculation that import one of these names."""
    return {
        ".".join(("seer", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "speculation" and not set(names).isdisjoint(imported_by(path))
    }


def test_engines_and_simulator_ask_the_same_function() -> None:
    for asking_module in (live_budget, depth, speculation):
        assert vars(asking_module)["allot"] is budget.allot
    assert importers("seer.speculation.budget.allot") == {
        "seer.drafting.live_budget",
        "seer.engine.vllm.gpu_drafts.depth",
        "seer.sim.speculation",
    }
    asking = importers("seer.drafting.live_budget.MeasuredBudget")
    assert asking == {"seer.engine.local.hosted", "seer.engine.vllm.step_drafting"}
    assert importers("seer.sim.speculation.SpeculationModel") >= {"seer.sim.draft_depths", "seer.sim.cluster"}


def test_no_other_module_decides_for_itself() -> None:
    decisions = {f"seer.speculation.throughput.{name}" for name in DECISIONS} | RULES
    assert importers(*decisions) == set()
