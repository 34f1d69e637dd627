# SPDX-License-Identifier: Apache-2.0
"""Everything that reads bytes which others wrote: each target takes bytes and returns, or raises an error of Seer.

Any other exception is a crash. `tests/fuzz/corpus/NAME` holds the inputs that the fuzzer of a target begins with.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from seer.drafting.log import LogStore
from seer.drafting.recording import read_groups
from seer.drafting.server import answer
from seer.drafting.wire import WireError, decode
from seer.engine import gpu_handles
from seer.errors import SeerError
from seer.hosting.channel import Channel
from seer.hosting.messages import Down, Up
from seer.hosting.remote.handshake import introduce, welcome
from seer.kvpool import _arena, mooncake_record, supervise
from seer.kvpool.local_files import PoolFiles
from seer.machine import private_files
from seer.machine.safetensors_header import read_header
from seer.metrics.jsonl import read_events
from seer.runs.journal_lines import read_journal
from seer.runs.prompts import read_prompts
from seer.runs.results import read_responses
from seer.runs.run_folder import RunFolder
from seer.sim.recorded import read_lengths
from seer.speculation.step_profile import StepProfile

Target = Callable[[bytes, Path], None]
"""Feeds bytes; the folder is the target's own."""


def draft_wire(data: bytes, folder: Path) -> None:
    """A frame from a draft client, decoded and answered."""
    with contextlib.suppress(WireError):
        answer(LogStore(), 1, decode(data), now=0.0)


def host_channel(data: bytes, folder: Path) -> None:
    """What an instance's process sends to the driver, and the driver to it."""
    for kind in (Up, Down):
        with contextlib.suppress(SeerError):
            asyncio.run(_receive_all(data, msgspec.msgpack.Decoder(kind)))


async def _receive_all(data: bytes, decoder: Any) -> None:
    channel: Channel[Any] = Channel(_fed(data), mock.Mock(), decoder, 0)
    while await channel.receive() is not None:
        pass


def handshake(data: bytes, folder: Path) -> None:
    """What a stranger says to the port of a driver, and a false driver to an instance."""
    for side in (_welcome, _introduce):
        with contextlib.suppress(SeerError, EOFError):
            asyncio.run(side(data))


async def _welcome(data: bytes) -> None:
    await welcome(_fed(data), mock.Mock(), {"launch": b"secret"})


async def _introduce(data: bytes) -> None:
    await introduce(_fed(data), mock.Mock(), "launch", b"secret")


def _fed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def of_file(name: str, read: Callable[[Path], object]) -> Target:
    """A target that reads a file of this name."""

    def target(data: bytes, folder: Path) -> None:
        path = folder / name
        path.write_bytes(data)
        with contextlib.suppress(SeerError):
            read(path)

    return target


def model_folder(file: str) -> Target:
    """A target that reads a model folder in which this file is the bytes."""

    def read(path: Path) -> None:
        from seer.engine.local.model_config import read_config
        from seer.engine.local.tokenizer import Tokenizer
        from seer.engine.local.weights import open_weights
        from seer.engine.vllm.model_folder import read_folder

        for reader in (read_config, read_folder, Tokenizer, open_weights):
            with contextlib.suppress(SeerError):
                reader(path.parent)

    return of_file(file, read)


def gguf(path: Path) -> None:
    """The container, its tensors, and the folder that is made of it."""
    from seer.engine.local.gguf_file import GgufFile

    file = GgufFile(path)
    for tensor in file.tensors:
        with contextlib.suppress(SeerError):
            file.read(tensor)
    from seer.engine.local.gguf import write_folder

    write_folder(file, path.parent / "made")


def pool_files(data: bytes, folder: Path) -> None:
    """The note and the state of a pool, in the folder of this user."""
    files = PoolFiles.named("fuzzed", str(folder))
    for path in (files.note, files.state):
        private_files.write(path, data)
    files.slab()
    with mock.patch("seer.machine.file_lock.is_held", return_value=True), mock.patch.object(supervise, "log"):
        supervise.find_state("fuzzed", str(folder))


def arena(path: Path) -> None:
    """The configuration of an arena; the rest is fuzzed under sanitizers (csrc/kvpool/tests/damage_test.cc)."""
    path.chmod(0o600)
    _arena.probe(str(path))


def pooled_block(data: bytes, folder: Path) -> None:
    """A block with its seal, as Mooncake hands it out."""
    row, key = np.frombuffer(data, np.uint8).copy(), bytes(32)
    block = np.empty(max(0, len(data) - mooncake_record.FOOTER_BYTES), np.uint8)
    if len(data) >= mooncake_record.FOOTER_BYTES:
        mooncake_record.unseal(row, len(data), block, key)


def gpu_handle_file(path: Path) -> None:
    """Handles of GPU memory, up to where torch would map them."""
    with (
        mock.patch.object(gpu_handles, "_tensor_of", lambda handle, path: handle),
        mock.patch.object(private_files, "is_inside", return_value=True),
        mock.patch.object(private_files, "read", lambda path, limit: path.read_bytes()),
    ):
        gpu_handles.open_handles(path)


def run_json(path: Path) -> None:
    """The manifest of a run folder."""
    RunFolder(path.parent).read_manifest()


def configuration(path: Path) -> None:
    """A --config file."""
    from seer.config import read_config_file

    read_config_file(path)


def metrics_page(data: bytes, folder: Path) -> None:
    """What Mooncake's master answers."""
    from seer.kvpool.mooncake_metrics import parse_tiers

    parse_tiers(data.decode(errors="replace"))


def simulation(path: Path) -> None:
    """The event log of a simulated run, replayed where it is small enough to end soon."""
    from seer.sim.replay import read_recording, replay

    recording = read_recording(path)
    workload = recording.workload
    if workload.num_instances <= 64 and workload.num_tokens <= 2_000:
        replay(recording)


def recorded_run(path: Path) -> None:
    """The event log of a run's folder, as `seer report` and `seer replay` read it."""
    from seer.analysis.whatif import read_recorded, replay_under
    from seer.metrics.perfetto import write_trace
    from seer.report.page import page_text

    folder = RunFolder(path.parent)
    limits = {"kv_blocks": 64, "block_size": 16, "max_num_seqs": 4, "max_model_len": 1024}
    options = {"scheduler": "seer", "instances": 1, "max_tokens": 40, "chunk_tokens": 16}
    folder.write_manifest({"command": "rollout", "options": options, "limits": limits})
    with contextlib.suppress(SeerError):  # a replay refuses more
        page_text(folder)
        write_trace(read_events(folder.events, allow_cut=True), folder.trace)
    recorded = read_recorded(folder)
    for scheduler in ("seer", "verl"):
        replay_under(recorded, scheduler)


def step_profile(path: Path) -> None:
    """What `seer profile` measured."""
    StepProfile.load(path).step_s(3, 2.0)


def _use_body(data: bytes, uses: Mapping[type[Any], Callable[[Any], object]]) -> None:
    """Read a body as each of these types, and use what was read as the endpoints do."""
    from seer.serve.bodies import decode
    from seer.serve.refusals import Refusal, error_response

    for kind, use in uses.items():
        try:
            use(decode(data, kind))
        except Refusal as refusal:
            error_response(refusal)  # which has parts of the body in it
        except SeerError:
            pass


def serve_bodies(data: bytes, folder: Path) -> None:
    """The body of a request to `seer serve`, as every endpoint reads and checks it."""
    from seer.serve.chat import ChatRequest
    from seer.serve.completions import CompletionRequest
    from seer.serve.messages import plain_messages
    from seer.serve.sglang import SglangRequest
    from seer.serve.token_generate import GenerateRequest
    from seer.serve.weight_endpoints import InitRequest, UpdateRequest

    uses: dict[type[Any], Callable[[Any], object]] = {
        CompletionRequest: lambda asked: (
            asked.check(),
            asked.sampling(3, 512, with_logprobs=True),
            asked.stop_strings,
        ),
        ChatRequest: lambda asked: (
            asked.check_supported(),
            plain_messages(asked.messages),
            asked.sampling(3, 512, with_logprobs=True),
        ),
        GenerateRequest: lambda asked: (asked.check(), asked.sampling_params.sampling(3, 512, with_logprobs=True)),
        SglangRequest: lambda asked: (asked.check(), asked.sampling_params.sampling(3, 512, with_logprobs=True)),
        UpdateRequest: lambda asked: (
            asked.update_info is None or [one.num_bytes() for one in asked.update_info.tensors()]
        ),
        InitRequest: lambda asked: None,
    }
    _use_body(data, uses)


def trl_bodies(data: bytes, folder: Path) -> None:
    """The body of a request of TRL's client: generation, chats, and weights tensor by tensor."""
    from seer.serve.messages import plain_messages
    from seer.serve.trl_generate import TrlChat, TrlGenerate
    from seer.serve.trl_weights import InitCommunicator, NamedParam
    from seer.serve.weight_group import Meeting, TensorInfo

    uses: dict[type[Any], Callable[[Any], object]] = {
        TrlGenerate: lambda asked: (asked.settle(), asked.sampling(3, 512, with_logprobs=True)),
        TrlChat: lambda asked: (
            list(map(plain_messages, asked.messages)),
            asked.settle(),
            asked.sampling(3, 512, with_logprobs=True),
        ),
        InitCommunicator: lambda asked: Meeting(host=asked.host, port=asked.port, rank=0),
        NamedParam: lambda asked: TensorInfo(asked.name, asked.dtype, tuple(asked.shape)).num_bytes(),
    }
    _use_body(data, uses)


def connector_metadata(data: bytes, folder: Path) -> None:
    """What a request carries through vLLM to the KV connector, up to the plan of a step where vLLM is installed."""
    extra = _extra(data)
    if importlib.util.find_spec("vllm") is not None:
        _plan_with(extra)


def scheduled_facts(data: bytes, folder: Path) -> None:
    """What a request carries through vLLM to our schedulers: drafts, and leases where vLLM is installed."""
    from seer.engine.vllm.chunk_facts import read_facts
    from seer.engine.vllm.step_drafting import StepDrafting

    extra = _extra(data)
    drafting = StepDrafting(max_tokens=4, max_model_len=64, padding="drafted", servers=(), fixed_tokens=4)
    requests = [_request_with(extra, f"r{number}") for number in range(2)]
    for request in requests:
        facts = read_facts(request.sampling_params, request.num_tokens)
        if facts is not None:
            drafting.track(request, facts)
            assert facts.num_prompt_tokens <= request.num_tokens
    for _ in range(2):
        drafting.begin_step()
        for request in requests:
            request.all_token_ids.append(7)
            request.num_tokens += 1
        drafting.end_step({request.request_id: 1 for request in requests}, {})
        drafts = drafting.draft([request.request_id for request in requests])
        assert all(len(draft) <= 4 for draft in drafts)
    drafting.close()
    if importlib.util.find_spec("vllm") is not None:
        _lease_with(requests)


def nccl_id(data: bytes, folder: Path) -> None:
    """What another rank sends before a broadcast over NCCL, where vLLM is installed."""
    if importlib.util.find_spec("vllm") is not None:
        from seer.engine.vllm.nccl_rendezvous import unique_id

        with contextlib.suppress(SeerError):
            unique_id(data)


def _lease_with(requests: list[Any]) -> None:
    with warnings.catch_warnings(action="ignore"):
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore

        from seer.engine.vllm.leased_scheduler import RENEW, LeasedScheduler

    with mock.patch.object(Scheduler, "__init__", lambda self: self.__dict__.update(requests={}, block_size=8)):
        scheduler = LeasedScheduler()
    with mock.patch.object(Scheduler, "add_request"):
        for request in requests:
            scheduler.add_request(request)
            assert 1 <= request.max_tokens <= 40
    for run, number, attempt in list(scheduler._leased):
        getattr(EngineCore, RENEW)(SimpleNamespace(scheduler=scheduler), run, [], [[number, attempt]])


def _extra(data: bytes) -> object:
    """As Python's own reader has it, which lets half characters pass."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _request_with(extra: object, name: str) -> Any:
    tokens = list(range(19))
    return SimpleNamespace(
        request_id=name, num_tokens=len(tokens), num_prompt_tokens=len(tokens), all_token_ids=tokens,
        num_computed_tokens=18, num_output_tokens=3, max_tokens=40, is_finished=lambda: False,
        sampling_params=SimpleNamespace(extra_args={"seer": extra}, min_tokens=0),
    )  # fmt: skip


def _plan_with(extra: object) -> None:
    with warnings.catch_warnings(action="ignore"):  # vLLM and what it imports warn of each other's deprecations
        from vllm.v1.request import RequestStatus

        from seer.engine.vllm.connector_plan import Plan
    from seer.config import TransferOptions
    from seer.kvpool.keys import KVLayout
    from seer.kvpool.none import NonePool

    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)
    pool: Any = NonePool()
    plan = Plan(pool, layout, "", tokens_per_step=1, options=TransferOptions(flush_blocks=1, flush_steps=1))
    tokens = list(range(19))
    request: Any = SimpleNamespace(
        request_id="r", num_tokens=len(tokens), all_token_ids=tokens, num_computed_tokens=16, num_output_tokens=3,
        status=RequestStatus.RUNNING, sampling_params=SimpleNamespace(extra_args={"seer": extra}),
    )  # fmt: skip
    plan.matched_tokens(request, 0)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    new = [SimpleNamespace(req_id="r", block_ids=([0, 1, 2, 3, 4],))]
    output: Any = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
    plan.step(output)
    plan.finish(request, [0, 1, 2, 3, 4])


def serve_headers(data: bytes, folder: Path) -> None:
    """Headers of a request to `seer serve`: keys, origins, names of hosts and sessions."""
    from starlette.requests import Request

    from seer.serve.groups import GroupNames
    from seer.serve.keys import Keys
    from seer.serve.refusals import Refusal, error_response
    from seer.serve.sessions import session_of

    lines = [line.partition(b":") for line in data.split(b"\n")]
    request = Request({"type": "http", "headers": [(name.lower(), value) for name, _, value in lines]})
    for keys in (Keys(), Keys(api="a" * 16), Keys(api="a" * 16, admin="b" * 16)):
        for is_admin in (False, True):
            try:
                keys.check(request.headers, is_admin=is_admin)
            except Refusal as refusal:
                error_response(refusal)
    GroupNames().name([1], session=session_of(request))


def response_text(data: bytes, folder: Path) -> None:
    """What a model wrote, as the readers of tool calls and code see it."""
    from seer.environments.python_tool import find_code
    from seer.serve.tool_calls import split_tool_calls

    text = data.decode(errors="replace")
    find_code(text)
    split_tool_calls(text)


TARGETS: dict[str, Target] = {
    "serve_headers": serve_headers,
    "response_text": response_text,
    "serve_bodies": serve_bodies,
    "trl_bodies": trl_bodies,
    "connector_metadata": connector_metadata,
    "scheduled_facts": scheduled_facts,
    "nccl_id": nccl_id,
    "draft_wire": draft_wire,
    "host_channel": host_channel,
    "handshake": handshake,
    "journal": of_file("journal.jsonl", read_journal),
    "events": of_file("events.jsonl", lambda path: list(read_events(path))),
    "simulation": of_file("simulated.jsonl", simulation),
    "recorded_run": of_file("events.jsonl", recorded_run),
    "results": of_file("results.jsonl", lambda path: list(read_responses(path))),
    "run_json": of_file("run.json", run_json),
    "prompts": of_file("p.jsonl", read_prompts),
    "configuration": of_file("run.toml", configuration),
    "model_config": model_folder("config.json"),
    "tokenizer": model_folder("tokenizer.json"),
    "tokenizer_config": model_folder("tokenizer_config.json"),
    "weight_index": model_folder("model.safetensors.index.json"),
    "safetensors": model_folder("model.safetensors"),
    "safetensors_header": of_file("header.safetensors", read_header),
    "gguf": of_file("model.gguf", gguf),
    "recording": of_file("groups.npz", read_groups),
    "trace_npz": of_file("lengths.npz", read_lengths),
    "trace_json": of_file("lengths.json", read_lengths),
    "trace_gz": of_file("lengths.json.gz", read_lengths),
    "pool_files": pool_files,
    "arena": of_file("arena", arena),
    "pooled_block": pooled_block,
    "gpu_handles": of_file("x.gpu-handles", gpu_handle_file),
    "metrics_page": metrics_page,
    "step_profile": of_file("profile.json", step_profile),
}
