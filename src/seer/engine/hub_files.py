# SPDX-License-Identifier: Apache-2.0
"""The files of a Hugging Face model folder as types: what the engines read of them, with the range of every number.

A field that is absent here is not read by Seer. Ranges are far above every published model, so that what is outside
of them is a damaged file and is refused before memory is taken for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from seer.errors import InputError
from seer.machine.given_files import check_given
from seer.machine.json_files import read_object, read_struct
from seer.ranges import TokenId

FOLDER_HINT = "a Hugging Face folder has config.json and *.safetensors"

Width = Annotated[int, Meta(ge=1, le=1 << 20)]
Heads = Annotated[int, Meta(ge=1, le=1 << 14)]
Experts = Annotated[int, Meta(ge=0, le=1 << 16)]
HeadDim = Annotated[int, Meta(ge=2, le=1 << 14)]
Layers = Annotated[int, Meta(ge=1, le=10_000)]
VocabSize = Annotated[int, Meta(ge=1, le=1 << 24)]
Context = Annotated[int, Meta(ge=1, le=1 << 24)]
RopeBase = Annotated[float, Meta(gt=0, le=1e15)]
Epsilon = Annotated[float, Meta(ge=0, le=1)]
EndTokens = TokenId | list[TokenId] | None


class DecoderFields(msgspec.Struct, kw_only=True):
    """What both engines read of config.json."""

    vocab_size: VocabSize
    hidden_size: Width | None = None
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: HeadDim | None = None
    max_position_embeddings: Context
    eos_token_id: EndTokens = None
    tie_word_embeddings: bool | None = None
    torch_dtype: str | None = None
    dtype: str | None = None

    def head_width(self, source: str) -> int:
        """Of one head; where the file does not say, the hidden size divided by the heads."""
        width = self.head_dim or (self.hidden_size or 0) // self.num_attention_heads
        if width < 1:
            raise InputError(
                f"{source}: hidden_size={self.hidden_size} has no room for {self.num_attention_heads} heads",
                hint="the file is damaged: download the folder again",
            )
        return width


class LocalDecoderFields(DecoderFields, kw_only=True):
    """What the local engine reads beside that."""

    hidden_size: Width
    intermediate_size: Width
    rope_theta: RopeBase | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: Epsilon = 1e-6
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    hidden_act: str = "silu"
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None


class Llama3Scaling(msgspec.Struct, kw_only=True):
    """Rotary scaling of the kind `llama3`."""

    factor: RopeBase
    low_freq_factor: RopeBase
    high_freq_factor: RopeBase
    original_max_position_embeddings: Context


class GenerationFields(msgspec.Struct, kw_only=True):
    """What is read of generation_config.json."""

    eos_token_id: EndTokens = None


class SpecialToken(msgspec.Struct):
    """A special token that is written as an object."""

    content: str


class NamedTemplate(msgspec.Struct):
    """One of several chat templates."""

    name: str
    template: str


class TokenizerFields(msgspec.Struct, kw_only=True):
    """What is read of tokenizer_config.json."""

    bos_token: str | SpecialToken | None = None
    eos_token: str | SpecialToken | None = None
    pad_token: str | SpecialToken | None = None
    chat_template: str | list[NamedTemplate] | None = None


NAME_BYTES = 255
"""The longest name of a file that Linux's file systems have."""


class WeightIndex(msgspec.Struct, kw_only=True):
    """What is read of model.safetensors.index.json."""

    weight_map: dict[str, str]
    """Name of a tensor -> name of the file that holds it."""


def read_config_object(folder: Path) -> dict[str, Any]:
    """config.json as it is."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise InputError(f"there is no model folder at {folder}", hint="`seer model get smollm2` downloads one")
    if not path.exists():
        raise InputError(f"{folder} holds no config.json", hint=FOLDER_HINT)
    _refuse_streams(folder)
    return read_object(path)


def _refuse_streams(folder: Path) -> None:
    """Refuse a folder with a pipe or a device: libraries that read the folder would wait for it, or read for ever."""
    for path in folder.iterdir():
        if path.exists() and not path.is_dir():
            check_given(path)


def end_tokens(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` as a tuple: the files write one id, several or none."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def generation_end_tokens(folder: Path) -> tuple[int, ...]:
    """End tokens that only generation_config.json names: chat models end turns with another token."""
    path = folder / "generation_config.json"
    return end_tokens(read_struct(path, GenerationFields).eos_token_id) if path.exists() else ()


def weight_files(folder: Path) -> list[Path] | None:
    """The files that a folder's index names, all of them in the folder itself; None without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return None
    names = sorted(set(read_struct(index, WeightIndex).weight_map.values()))
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name or len(name.encode()) > NAME_BYTES:
            raise InputError(f"{index}: {name!r} is not the name of a file in this folder", hint="do not use it")
        if not (folder / name).exists():
            raise InputError(f"{folder} lacks {name}, listed in its index", hint="download the folder again")
    return [folder / name for name in names]
