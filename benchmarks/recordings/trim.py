# SPDX-License-Identifier: Apache-2.0
"""Make a recording smaller: fewer groups, shorter responses.

    python benchmarks/recordings/trim.py IN.npz OUT.npz [--groups 64] [--max-tokens 400] [--without-sets aime]

Reads recordings with `lengths` of groups x responses. The array `sets`, if present, names where each prompt is from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from seer.drafting.recording import read_groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="IN.npz")
    parser.add_argument("target", type=Path, metavar="OUT.npz")
    parser.add_argument("--groups", type=int, help="keep only the first groups")
    parser.add_argument("--max-tokens", type=int, help="keep only the first tokens of each response")
    parser.add_argument("--without-sets", nargs="+", default=[], help="leave out the groups of these sets")
    args = parser.parse_args()
    with np.load(args.source) as file:
        sets = file["sets"] if "sets" in file.files else None
        dtype = file["tokens"].dtype
    groups = read_groups(args.source)
    kept = [i for i in range(len(groups)) if sets is None or sets[i] not in args.without_sets][: args.groups]
    responses = [[tokens[: args.max_tokens] for tokens in groups[i].responses] for i in kept]
    arrays = {
        "lengths": np.array([[len(tokens) for tokens in group] for group in responses], np.int32),
        "tokens": np.concatenate([tokens for group in responses for tokens in group]).astype(dtype),
        "prompt_lengths": np.array([len(groups[i].prompt) for i in kept], np.int32),
        "prompts": np.concatenate([groups[i].prompt for i in kept]).astype(dtype),
    }
    if sets is not None:
        arrays["sets"] = sets[kept]
    np.savez_compressed(args.target, **arrays)


if __name__ == "__main__":
    main()
