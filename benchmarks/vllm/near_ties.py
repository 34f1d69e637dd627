# SPDX-License-Identifier: Apache-2.0
"""Where two runs of equality.py part: was it a near tie?

    python benchmarks/vllm/near_ties.py --model DIR DIR/equality-float32.json

A token is the maximum of logits plus noise, and the noise is a function of (seed, position, token). With the logits of
the same context in float32, computed by transformers, and vLLM's noise, the *lead* of the plain engine's token over the
other one is known. Rounding is the cause where the lead is smaller than what rounding changes. That is measured at the
same places: the log-probability that an engine gave a token, less the one in float32. As a comparison, the lead of the
sampled token over the second best at places where the runs agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from seer.verification.noise import vllm_noise
from stamp import print_stamp


def noise_of(places: list[dict[str, Any]], width: int) -> torch.Tensor:
    """[places, tokens]; the noise of a token is drawn at the position of the token before it."""
    rows = [vllm_noise(one["seed"], len(one["context"]) - 1, width) for one in places]
    return torch.from_numpy(np.stack(rows))


@torch.inference_mode()
def logits_of(model: Any, places: list[dict[str, Any]]) -> torch.Tensor:
    """[places, tokens], in float32."""
    rows = []
    for one in places:
        rows.append(model(torch.tensor([one["context"]], device=model.device)).logits[0, -1].float().cpu())
    return torch.stack(rows)


def look_at(model: Any, places: list[dict[str, Any]]) -> dict[str, Any]:
    """Leads, what bfloat16 changed, and whether the sampled tokens are explained at all."""
    logits = logits_of(model, places)
    scores = logits + noise_of(places, logits.shape[1])
    best = scores.topk(2)
    tokens = torch.tensor([one["tokens"] for one in places])
    at = torch.arange(len(places))
    parted = tokens[:, 0] != tokens[:, 1]
    other = torch.where(parted, tokens[:, 1], best.indices[:, 1])
    lead = (scores[at, tokens[:, 0]] - scores[at, other]).abs().numpy()
    exact = logits.log_softmax(-1).gather(1, tokens).numpy()
    changed = np.abs(np.array([one["logprobs"] for one in places]) - exact)
    is_best = (best.indices[:, :1] == tokens).any(1)
    return {
        "places": len(places),
        "one of the two is the best in float32": int(is_best.sum()),
        "lead": _quantiles(lead),
        "changed by rounding": _quantiles(changed.max(1)),
        "lead below what rounding changes at most": int((lead <= 2 * changed.max()).sum()),
    }


def _quantiles(values: Any) -> dict[str, float]:
    return {f"{q:.0%}": float(f"{np.quantile(values, q):.3g}") for q in (0.0, 0.5, 0.9, 0.99, 1.0)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path, help="of equality.py")
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--device", default="cuda", help="where float32 logits are computed (%(default)s)")
    options.add_argument("--most", type=int, default=400, help="places looked at (%(default)s)")
    args = options.parse_args()
    print_stamp(args)
    from transformers import AutoModelForCausalLM

    found = json.loads(args.file.read_text())
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    for name in ("partings", "agreed"):
        if found[name]:
            print(name, json.dumps(look_at(model, found[name][: args.most])), flush=True)


if __name__ == "__main__":
    main()
