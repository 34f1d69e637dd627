# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that our classes override or replace, each looked for before an engine starts.

    feature      without its names, or on a vLLM newer than any known one
    counting     vLLM's own scheduler: steps are not counted, tokens are sent as vLLM sends them, leases are not
                 extended
    drafts       no drafts
    pool         no pool: what has moved is computed again

What is missing is said in one line, and the engine runs without it. gpu_drafts/install.py guards drafts on the GPU.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace

from seer.engine.vllm.settings import VllmSettings
from seer.engine.vllm.version import NEWEST, SUPPORTED, is_newer, require_vllm

log = logging.getLogger(__name__)

Names = tuple[tuple[str, str, tuple[str, ...]], ...]
"""Module, name in it, and methods of it."""

COUNTING: Names = (
    ("vllm.v1.core.sched.scheduler", "Scheduler", ("update_from_output", "schedule", "add_request", "make_stats")),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", ()),
    ("vllm.v1.outputs", "LogprobsLists", ()),
    ("vllm.v1.engine.core", "EngineCore", ()),
    ("vllm.v1.engine.core_client", "AsyncMPClient", ("call_utility_async",)),
    ("vllm.v1.request", "Request", ("num_output_tokens", "is_finished")),
)
DRAFTS: Names = (
    *COUNTING,
    ("vllm.v1.core.sched.scheduler", "Scheduler", ("update_draft_token_ids",)),
    ("vllm.v1.outputs", "DraftTokenIds", ()),
    ("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", ()),
)
CPU_DRAFTS: Names = (*DRAFTS, ("vllm.triton_utils.dispatcher", "register_kernels", ()))
"""On a CPU one of vLLM's kernels has to be replaced (proposer.py), and older versions have no registry of them."""
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
POOL: Names = (
    (
        f"{CONNECTOR}.base",
        "KVConnectorBase_V1",
        (
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
            "request_finished",
            "register_kv_caches",
            "bind_connector_metadata",
            "start_load_kv",
            "get_finished",
            "get_block_ids_with_load_errors",
            "get_kv_connector_stats",
            "build_kv_connector_stats",
        ),
    ),
    (f"{CONNECTOR}.base", "KVConnectorMetadata", ()),
    (f"{CONNECTOR}.metrics", "KVConnectorStats", ("aggregate", "reduce", "reset", "is_empty")),
    ("vllm.distributed.kv_transfer", "get_kv_transfer_group", ()),
)


def guarded(settings: VllmSettings) -> VllmSettings:
    """The settings without the features that this vLLM cannot run; one line in the log says which and why."""
    version = require_vllm()
    if is_newer(version):
        log.warning(
            "vLLM %s is newer than %d.%d, and Seer knows %s: it runs plain, without drafts and pool",
            version,
            *NEWEST,
            SUPPORTED,
        )
        return _plain(settings)
    lacking = {feature: missing for feature, names in _used(settings).items() if (missing := missing_name(names))}
    if not lacking:
        return settings
    log.warning("vLLM %s runs without %s", version, "; without ".join(f"{k} ({v})" for k, v in lacking.items()))
    return replace(
        settings,
        counts_steps="counting" not in lacking,
        speculation=None if "drafts" in lacking else settings.speculation,
        pool=None if "pool" in lacking else settings.pool,
    )


def _plain(settings: VllmSettings) -> VllmSettings:
    return replace(settings, counts_steps=False, speculation=None, pool=None)


def _used(settings: VllmSettings) -> dict[str, Names]:
    """The names of each feature that these settings ask for."""
    in_scheduler = settings.speculation is not None and settings.speculation.place == "scheduler"
    drafts = CPU_DRAFTS if settings.device == "cpu" else DRAFTS
    wanted = {"counting": COUNTING, "drafts": drafts if in_scheduler else (), "pool": POOL if settings.pool else ()}
    return {feature: names for feature, names in wanted.items() if names}


def missing_name(names: Names) -> str | None:
    """The first of them that this vLLM lacks."""
    for module, name, parts in names:
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            return f"{module} cannot be imported: {error}"
        if found is None:
            return f"{module} has no {name}"
        absent = next((part for part in parts if not hasattr(found, part)), None)
        if absent is not None:
            return f"{module}.{name} has no {absent}"
    return None
