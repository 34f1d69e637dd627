# SPDX-License-Identifier: Apache-2.0
"""The diff at the top of docs/use-in-verl.md is of the command that tests/verl_training runs."""

from __future__ import annotations

from pathlib import Path

REPO = Path(__file__).parents[2]


def command_of(lines: list[str]) -> list[str]:
    """A command over several lines, from its first to its last one."""
    first = next(at for at, line in enumerate(lines) if "verl.trainer.main_ppo" in line)
    words = [line.removeprefix("exec ").strip().removesuffix("\\").strip() for line in lines[first:]]
    return [word for word in words if word and word != '"$@"']


def test_the_diff_is_of_the_script_that_is_tested() -> None:
    page = (REPO / "docs/use-in-verl.md").read_text()
    diff = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    script = command_of((REPO / "examples/grpo_verl/train.sh").read_text().splitlines())
    for sign, rollout in (("-", "vllm"), ("+", "seer")):
        shown = command_of([line[1:] for line in diff if line[0] in (" ", sign)])
        assert shown == [word.replace("$ROLLOUT", rollout) for word in script]
