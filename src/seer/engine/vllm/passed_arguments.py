# SPDX-License-Identifier: Apache-2.0
"""The engine arguments that a user passes to vLLM: checked before anything starts. Does not import vLLM.

vLLM would check their names only after half a minute of imports in the instance's process, and it cannot know which of
them Seer relies on: some would be overwritten, with others responses would come out wrong.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from seer.engine.vllm.connector_parts import SPLIT_OTHERWISE
from seer.errors import ConfigError, InputError
from seer.machine.given_files import read_given

_MAX_SOURCE_BYTES = 8 << 20
_OWN = "leave it out: Seer has its own"
_ON_TOKENS = "leave it out: instances take and give token ids"
_LORA = "merge the adapter into the weights: no request names one"
SET_OTHERWISE = {
    "model": "set model of the rollout",
    "model_weights": "set model of the rollout",
    "dtype": "set dtype of the rollout",
    "max_model_len": "set max_model_len of the rollout",
    "max_num_seqs": "set max_num_seqs of the rollout",
    "block_size": "set kv.block_size of the rollout",
    "num_gpu_blocks_override": "set kv.blocks of the rollout",
    "kv_cache_memory_bytes": "set kv.memory_bytes of the rollout",
    "stream_interval": "set engine_settings.stream_tokens",
    "speculative_config": "set engine_settings.speculation, or speculation = 'off' of the rollout",
    "spec_method": "set engine_settings.speculation",
    "spec_model": "set engine_settings.speculation",
    "spec_tokens": "set engine_settings.speculation",
    "kv_transfer_config": "set pool of the rollout",
    "scheduler_cls": _OWN,
    "worker_cls": _OWN,
    "worker_extension_cls": _OWN,
    "additional_config": _OWN,
    "async_scheduling": "leave it out: drafts decide it",
    "disable_log_stats": "leave it out: steps are counted by them",
    "logprobs_mode": "leave it out: log-probabilities are those of the distribution that was sampled from",
    "generation_config": "set sampling",
    "override_generation_config": "set sampling",
    "logits_processors": "logits cannot be changed",
    "runner": "leave it out: instances generate",
    "convert": "leave it out: instances generate",
    "skip_tokenizer_init": _ON_TOKENS,
    "tokenizer": _ON_TOKENS,
    "tokenizer_mode": _ON_TOKENS,
}
"""Arguments that are refused, and what to set instead; `seer.engine.prepare.OWN_ARGUMENTS` has those that spread an
engine."""


def refuse_arguments(given: Mapping[str, Any], *, on_cpu: bool, has_pool: bool) -> None:
    """Raise for an argument that Seer sets itself, that an instance cannot run with, or that vLLM does not have."""
    known = argument_names()
    for name, value in given.items():
        where = f"engine_settings.engine.{name}={_shown(value)}"
        if name in SET_OTHERWISE:
            raise ConfigError(where, hint=SET_OTHERWISE[name])
        if "lora" in name:
            raise ConfigError(where, hint=_LORA)
        if on_cpu and name == "enable_chunked_prefill" and value:
            raise ConfigError(where, hint="leave it out: on a CPU it ends vLLM's engine where requests have seeds")
        if has_pool and name in SPLIT_OTHERWISE and value != 1:
            raise ConfigError(where, hint="pool = 'none', or tensor_parallel and more instances")
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError):
            hint = "numbers, text, lists and dictionaries reach the instance's process"
            raise ConfigError(where, hint=hint) from None
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "`vllm serve --help=all` lists them, with dashes"
            raise ConfigError(f"{where}: the installed vLLM has no such argument", hint=hint)


@functools.cache
def argument_names() -> tuple[str, ...] | None:
    """The arguments of the installed vLLM's engine, read from its source; None if they are not found there."""
    found = importlib.util.find_spec("vllm")
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        try:
            source = read_given(Path(place) / "engine" / "arg_utils.py", limit_bytes=_MAX_SOURCE_BYTES)
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, InputError):
            return None
        classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
        if {"EngineArgs", "AsyncEngineArgs"} <= classes.keys():
            fields = (*classes["EngineArgs"].body, *classes["AsyncEngineArgs"].body)
            return tuple(
                one.target.id for one in fields if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            )
    return None


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
