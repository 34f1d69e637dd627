# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the angle of every position, computed once.

Tables are fp32 for any dtype, because bf16 cannot represent angles at positions in the thousands.
"""

from __future__ import annotations

import math

import torch

from seer.engine.local.model_config import ModelConfig


class RotaryTable:
    """cos and sin [position, head_dim / 2]."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies = _frequencies(config)
        angles = torch.arange(config.max_model_len, dtype=torch.float32)[:, None] * frequencies
        self.cosine = angles.cos().to(device)
        self.sine = angles.sin().to(device)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the given positions."""
        return self.cosine[positions], self.sine[positions]


def _frequencies(config: ModelConfig) -> torch.Tensor:
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponent)
    if config.rope_scaling is None:
        return plain
    # Llama 3.1: low frequencies are divided by `factor`, high ones are kept, those between are blended.
    scaling = config.rope_scaling
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    scaled: torch.Tensor = plain / scaling["factor"] * (1 - blend) + plain * blend
    return scaled
