# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: what would run, with every default filled in, and how much memory it takes.

The text is TOML with the plan in comments, so that it can be kept and given to `--config`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from seer.config import RunConfig, plain_values, to_toml


def print_dry_run(config: RunConfig, *, as_json: bool) -> None:
    """Print the resolved configuration and the memory plan; reads the model's configuration and the prompts."""
    from seer.cli.prompt_file import load_prompts
    from seer.engine.prepare import prepare
    from seer.hosting.memory_limits import refuse_what_cannot_fit
    from seer.hosting.memory_plan import plan_memory

    engine = prepare(config.rollout)
    refuse_what_cannot_fit(engine)
    prompts = load_prompts(config, engine) if config.prompts is not None else []
    num_responses = sum(prompt.n for prompt in prompts)
    resolved = replace(config, rollout=engine.config)
    plan = plan_memory(engine)
    if as_json:
        shown = {
            "config": plain_values(resolved),
            "num_prompts": len(prompts),
            "num_responses": num_responses,
            "memory_plan": plan.as_values(),
        }
        sys.stdout.write(json.dumps(shown) + "\n")
        return
    asked = f"{len(prompts):,}, {num_responses:,} responses" if prompts else "none given"
    comments = "".join(f"# {line}\n" for line in (f"prompts           {asked}", *plan.lines()))
    sys.stdout.write(f"{to_toml(resolved)}\n{comments}")
