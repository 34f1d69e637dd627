# SPDX-License-Identifier: Apache-2.0
"""For gpu.py where flash-attn is missing: verl's log-probabilities, many rows at a time.

Without that package's kernel verl takes them row by row to save memory, which on an H200 was three quarters of a step
of a small model. The formulas here are verl's. verl's processes import this (VERL_USE_EXTERNAL_MODULES), under both
rollouts.
"""

from __future__ import annotations

import torch
from verl.utils import torch_functional

ROWS = 1024
"""Of 152,000 float32 values each, 0.6 GB."""


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What `logprobs_from_logits_v2` gives."""
    rows, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    parts = [_of_rows(part, ids) for part, ids in zip(rows.split(ROWS), wanted.split(ROWS), strict=True)]
    return torch.cat(parts).view(labels.shape)


def _of_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    index = labels.unsqueeze(-1)
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(-1, index).squeeze(-1) - torch.logsumexp(logits, dim=-1)
    return torch.log_softmax(logits, dim=-1).gather(-1, index).squeeze(-1)


torch_functional.logprobs_from_logits_v2 = log_probabilities
