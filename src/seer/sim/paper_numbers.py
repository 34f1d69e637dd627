# SPDX-License-Identifier: Apache-2.0
"""The numbers of the paper's evaluation (arXiv 2511.14617 v3, OSDI '26), and the headlines of its first version.

Rows are in the order of the paper; the three numbers of a row are for moonlight, qwen2-vl-72b and kimi-k2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

TABLE_4 = {
    "+ divided rollout": ("divided", (1.41, 1.42, 1.16)),
    "+ context scheduling": ("context", (1.47, 1.56, 1.27)),
    "+ grouped speculation": ("seer-paper", (1.90, 2.04, 1.53)),
    "ours": ("seer", (None, None, None)),
}
"""Row -> scheduler, and throughput over veRL for each of `WORKLOADS`."""
FIGURE_7: dict[str, tuple[str, Mapping[int, tuple[float | None, ...]]]] = {
    "veRL + SD": ("verl-sync+sd", {8: (1.16, 1.14, 1.26), 16: (1.34, 1.08, 1.22)}),
    "StreamRL-Oracle": ("streamrl-oracle", {8: (1.21, 1.33, 0.99), 16: (1.30, 1.43, 0.94)}),
    "StreamRL-Oracle + SD": ("streamrl-oracle+sd", {8: (1.62, 1.46, 1.09), 16: (1.56, 1.57, 1.02)}),
    "Seer": ("seer-paper", {8: (1.78, 1.82, 1.48), 16: (1.83, 2.04, 1.44)}),
    "ours": ("seer", {8: (None, None, None), 16: (None, None, None)}),
}
"""Row -> scheduler, and throughput over veRL by group size, for each of `WORKLOADS`."""
FIGURE_8 = {
    "moonlight": {"veRL": (3910.0, 1817.0), "Seer": (2181.0, 278.0)},
    "qwen2-vl-72b": {"veRL": (3957.0, 2301.0), "Seer": (1922.0, 123.0)},
    "kimi-k2": {"veRL": (12202.0, 3144.0), "Seer": (8267.0, 850.0)},
}
"""Total and tail seconds."""
TAIL_CUT = {"moonlight": 0.84, "qwen2-vl-72b": 0.94, "kimi-k2": 0.72}
"""As printed. Computed from the seconds of figure 8 they are 85%, 95% and 73%."""
CONTEXT_STUDY = {
    "no context": ("divided", 1.42, 0.79),
    "context-aware": ("context", 1.56, 0.11),
    "oracle": ("oracle", 1.63, 0.00),
}
"""Row -> scheduler, throughput over veRL, share of veRL's tail; qwen2-vl-72b without speculation."""
PAPER_ORACLE_SHARE = 0.96
"""Throughput of context-aware scheduling over the oracle's, qwen2-vl-72b, as the paper reports it."""
SD_ON_VERL = {
    "moonlight": {"plain": (1.18, 1.67), "grouped": (1.26, 1.89)},
    "qwen2-vl-72b": {"plain": (1.06, 2.19), "grouped": (1.38, 2.15)},
    "kimi-k2": {"plain": (1.22, 1.74), "grouped": (1.25, 1.77)},
}
"""Figure 11: speedup over veRL without drafts, and mean acceptance length, with plain and with grouped speculation."""
PHASE_SHARES = {
    "moonlight": (0.84, 0.14, 0.02),
    "qwen2-vl-72b": (0.63, 0.31, 0.06),
    "kimi-k2": (0.87, 0.10, 0.03),
}
"""Table 1: shares of an iteration for rollout, training and weight update, under veRL."""
FIRST_VERSION: dict[str, tuple[str, Literal["speedup", "tail_share"], str]] = {
    "+ divided rollout": ("divided", "speedup", "up to 1.35"),
    "+ context scheduling": ("context", "speedup", "up to 1.47"),
    "+ grouped speculation": ("seer-paper", "speedup", "1.77-1.87"),
    "end to end": ("seer-paper", "speedup", "1.74-1.97"),
    "tail": ("seer-paper", "tail_share", "7%-25%"),
    "ours, end to end": ("seer", "speedup", "1.74-1.97"),
    "ours, tail": ("seer", "tail_share", "7%-25%"),
}
"""Row -> scheduler, measure, and the range that the first version states over its three workloads."""
