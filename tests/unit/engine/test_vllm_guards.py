# SPDX-License-Identifier: Apache-2.0
"""On a vLLM that lacks a name, or that is newer than any known one, the engine runs without what it cannot do."""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from seer.config import VllmSpeculation
from seer.engine.vllm.engine_arguments import engine_arguments
from seer.engine.vllm.settings import VllmSettings
from vllm_engines import needs_vllm
from vllm_names import offer, read

pytestmark = needs_vllm
ALL = VllmSettings(
    model_dir=str(Path("m")),
    max_model_len=64,
    speculation=VllmSpeculation(),
    pool={"backend": "local", "block_bytes": 1},
)


def run_with(caplog: pytest.LogCaptureFixture) -> tuple[VllmSettings, list[str]]:
    from seer.engine.vllm.guards import guarded

    with caplog.at_level(logging.WARNING):
        return guarded(ALL), [record.getMessage() for record in caplog.records]


def test_the_installed_version_has_every_name(caplog: pytest.LogCaptureFixture) -> None:
    assert run_with(caplog) == (ALL, [])


@pytest.mark.parametrize(
    ("module", "name", "kept", "reason"),
    [
        ("vllm.v1.outputs", "DraftTokenIds", "pool counting", "drafts (vllm.v1.outputs has no DraftTokenIds)"),
        ("vllm.triton_utils.dispatcher", "register_kernels", "pool counting", "dispatcher has no register_kernels"),
        ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "pool", "counting (vllm.v1.core.sched.async_sched"),
        (
            "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1",
            "get_block_ids_with_load_errors",
            "drafts counting",
            "pool (vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1 has no get_block_ids",
        ),
    ],
)
def test_what_lacks_a_name_is_left_out_and_said_in_one_line(
    module: str, name: str, kept: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parent, _, last = module.rpartition(".")
    owner = getattr(importlib.import_module(parent), last) if last[0].isupper() else importlib.import_module(module)
    monkeypatch.delattr(owner, name)
    found, lines = run_with(caplog)
    assert {"pool": found.pool, "drafts": found.speculation, "counting": found.counts_steps} == {
        "pool": ALL.pool if "pool" in kept else None,
        "drafts": ALL.speculation if "drafts" in kept else None,
        "counting": "counting" in kept,
    }
    assert len(lines) == 1
    assert reason in lines[0]


@pytest.mark.parametrize("release", read())
def test_every_release_has_the_names_but_a_registry_of_kernels(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from seer.engine.vllm import guards
    from seer.engine.vllm.gpu_drafts import install

    monkeypatch.setattr(importlib, "import_module", offer(read()[release]))
    assert guards.missing_name((*guards.DRAFTS, *guards.POOL)) is None
    assert install.missing_names() is None
    has_registry = tuple(map(int, release.split("."))) >= (0, 31)
    assert (guards.missing_name(guards.CPU_DRAFTS) is None) == has_registry


@pytest.mark.parametrize("release", read())
def test_our_methods_take_what_every_release_gives_them(release: str) -> None:
    from seer.engine.vllm.connector import SeerPoolConnector
    from seer.engine.vllm.gpu_drafts.scheduler import GroupedDraftsScheduler
    from seer.engine.vllm.scheduler import SeerScheduler

    ours = {
        "Scheduler": (SeerScheduler, GroupedDraftsScheduler),
        "KVConnectorBase_V1": (SeerPoolConnector,),
    }
    num_checked = 0
    for names in read()[release].values():
        for name in ours.keys() & names:
            for (method, arguments), our_class in itertools.product(names[name].items(), ours[name]):
                given = arguments[1:] if arguments[0] == "cls" else arguments
                inspect.signature(getattr(our_class, method)).bind(*given)
                num_checked += 1
    assert num_checked > 20


def test_a_gpu_needs_no_registry_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from seer.engine.vllm.guards import guarded

    monkeypatch.delattr(importlib.import_module("vllm.triton_utils.dispatcher"), "register_kernels")
    assert guarded(replace(ALL, device="cuda")).speculation == ALL.speculation


def test_a_version_newer_than_any_known_runs_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from seer.engine.vllm import guards

    monkeypatch.setattr(guards, "require_vllm", lambda: "0.34.0")
    found, lines = run_with(caplog)
    arguments = engine_arguments(found, "identity")
    assert not {"scheduler_cls", "speculative_config", "kv_transfer_config"} & set(arguments)
    assert lines == [
        "vLLM 0.34.0 is newer than 0.33, and Seer knows 0.26 to 0.33: it runs plain, without drafts and pool"
    ]
