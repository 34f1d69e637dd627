# SPDX-License-Identifier: Apache-2.0
"""Where two runs of equality.py part in bfloat16: was it a near tie?

    python benchmarks/vllm/near_ties.py --model DIR DIR/equality-bfloat16.json

A token is the maximum of logits plus noise, and the noise is a function of (seed, position, token). With the logits of
the same context in float32, computed by transformers, and vLLM's noise, the *lead* of the plain engine's token over the
other one is known. Rounding is the cause where the lead is smaller than what bfloat16 changes. That is measured at the
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
import triton
import triton.language as tl
from triton.language.extra import libdevice

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from stamp import print_stamp

BLOCK = 1024


@triton.jit
def noise_kernel(seed_ptr, position_ptr, out_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """vLLM's noise for every token of the vocabulary (vllm/v1/worker/gpu/sample/gumbel.py)."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.randint(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    uniform = tl.maximum(tl.rand(seed, token), 4.6566127342e-10)
    noise = -tl.log(-libdevice.log1p(-uniform))
    tl.store(out_ptr + row * width + token, noise, mask=token < width)


def noise_of(places: list[dict[str, Any]], width: int) -> torch.Tensor:
    """[places, tokens]; the noise of a token is drawn at the position of the token before it."""
    seeds = torch.tensor([one["seed"] for one in places], dtype=torch.int64, device="cuda")
    positions = torch.tensor([len(one["context"]) - 1 for one in places], dtype=torch.int64, device="cuda")
    out = torch.empty(len(places), width, device="cuda")
    noise_kernel[(len(places), triton.cdiv(width, BLOCK))](seeds, positions, out, width, BLOCK=BLOCK)
    return out


@torch.inference_mode()
def logits_of(model: Any, places: list[dict[str, Any]]) -> torch.Tensor:
    """[places, tokens], in float32."""
    rows = []
    for one in places:
        rows.append(model(torch.tensor([one["context"]], device="cuda")).logits[0, -1].float())
    return torch.stack(rows)


def look_at(model: Any, places: list[dict[str, Any]]) -> dict[str, Any]:
    """Leads, what bfloat16 changed, and whether the sampled tokens are explained at all."""
    logits = logits_of(model, places)
    scores = logits + noise_of(places, logits.shape[1])
    best = scores.topk(2)
    tokens = torch.tensor([one["tokens"] for one in places], device="cuda")
    at = torch.arange(len(places), device="cuda")
    parted = tokens[:, 0] != tokens[:, 1]
    other = torch.where(parted, tokens[:, 1], best.indices[:, 1])
    lead = (scores[at, tokens[:, 0]] - scores[at, other]).abs().cpu().numpy()
    exact = logits.log_softmax(-1).gather(1, tokens).cpu().numpy()
    changed = np.abs(np.array([one["logprobs"] for one in places]) - exact)
    is_best = (best.indices[:, :1] == tokens).any(1)
    return {
        "places": len(places),
        "one of the two is the best in float32": int(is_best.sum()),
        "lead": _quantiles(lead),
        "changed by bfloat16": _quantiles(changed.max(1)),
        "lead below what bfloat16 changes at most": int((lead <= 2 * changed.max()).sum()),
    }


def _quantiles(values: Any) -> dict[str, float]:
    return {f"{q:.0%}": round(float(np.quantile(values, q)), 4) for q in (0.0, 0.5, 0.9, 0.99, 1.0)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path, help="of equality.py")
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--most", type=int, default=400, help="places looked at (%(default)s)")
    args = options.parse_args()
    print_stamp(args)
    from transformers import AutoModelForCausalLM

    found = json.loads(args.file.read_text())
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to("cuda").eval()
    for name in ("partings", "agreed"):
        if found[name]:
            print(name, json.dumps(look_at(model, found[name][: args.most])), flush=True)


if __name__ == "__main__":
    main()
