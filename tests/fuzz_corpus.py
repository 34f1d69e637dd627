# SPDX-License-Identifier: Apache-2.0
"""Write the corpus of the fuzzers: a small good input for every target. `python tests/fuzz_corpus.py` makes it anew.

Inputs that crashed a reader (`crash*`) are kept.
"""

from __future__ import annotations

import gzip
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bad_files import CONFIG, GOOD, SCALING, TOKENIZER, npz
from builders import a_response
from seer.cli.run_config import recorded
from seer.config import RunConfig, to_toml
from seer.drafting.wire import Drop, Fetch, Known, Push, Register, Tail, encode
from seer.engine.base import InstanceView
from seer.engine.gpu_handles import TensorHandle
from seer.hosting.channel import frame
from seer.hosting.messages import Broken, CallResult, News, Ready, StartFailed
from seer.hosting.remote.handshake import Challenge, Introduction, Time, Welcome
from seer.kvpool import mooncake_record
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig, Note, PoolFiles
from seer.kvpool.serve import ServeState
from seer.metrics.jsonl import EventLog
from seer.runs.journal_lines import VERSION, Checksums, JournalHeader, JournalLine, JournalSpan
from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.cluster import simulate
from seer.speculation.step_profile import ProfilePoint, StepProfile
from seer.types import ChunkEnd, ChunkOutput, InstanceLimits, TokenSpan

CORPUS = Path(__file__).parent / "fuzz" / "corpus"


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_file() -> bytes:
    """A llama model of one tensor, as small as the format allows."""
    fields: dict[str, tuple[int, bytes]] = {
        "general.architecture": (8, gguf_string("llama")),
        "llama.attention.head_count": (4, struct.pack("<I", 2)),
        "llama.attention.head_count_kv": (4, struct.pack("<I", 2)),
        "llama.embedding_length": (4, struct.pack("<I", 8)),
        "llama.feed_forward_length": (4, struct.pack("<I", 8)),
        "llama.block_count": (4, struct.pack("<I", 1)),
        "llama.context_length": (4, struct.pack("<I", 16)),
        "llama.attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-5)),
        "llama.rope.freq_base": (6, struct.pack("<f", 1e4)),
        "tokenizer.ggml.model": (8, gguf_string("gpt2")),
        "tokenizer.ggml.tokens": (9, struct.pack("<IQ", 8, 2) + gguf_string("a") + gguf_string("b")),
        "tokenizer.ggml.token_type": (9, struct.pack("<IQ2i", 5, 2, 1, 3)),
        "tokenizer.ggml.merges": (9, struct.pack("<IQ", 8, 1) + gguf_string("a b")),
        "tokenizer.ggml.eos_token_id": (4, struct.pack("<I", 1)),
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields))
    for name, (kind, value) in fields.items():
        head += gguf_string(name) + struct.pack("<I", kind) + value
    head += gguf_string("blk.0.attn_q.weight") + struct.pack("<I2QIQ", 2, 8, 8, 0, 0)
    return head + bytes(-len(head) % 32) + np.arange(64, dtype=np.float32).tobytes()


def safetensors_file() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"x": "y"}})
    return struct.pack("<Q", len(header)) + header.encode() + bytes(8)


def first_messages() -> bytes:
    """What a driver and an instance say first to each other."""
    nonce = bytes(32)
    said = [Challenge("0.1.0", nonce), Introduction("0.1.0", "launch", nonce, nonce), Welcome(nonce), Time(1.5)]
    return b"".join(frame(one) for one in said)


def host_frames() -> bytes:
    limits = InstanceLimits(kv_blocks=4, block_size=16, max_num_seqs=2, max_model_len=64)
    output = ChunkOutput(1, 2, 0, 2, TokenSpan([3, 4], [-0.5, -0.25], 0), ChunkEnd.STOP)
    up = (Ready(limits, InstanceView(), 128), News([output], [], InstanceView()), CallResult(1, "no", "PoolError"))
    return b"".join(frame(one, i) for i, one in enumerate((*up, StartFailed("no", "x"), Broken("no", "x"))))


def journal() -> bytes:
    checksums = Checksums()
    header = checksums.sealed(JournalHeader(VERSION, "settings", "weights"))
    span = JournalSpan([5, 6], [-0.5, -0.5], 0)
    return header + checksums.sealed(JournalLine(0, 1, 0, [span])) + checksums.sealed(JournalLine(0, 1, 2, [span]))


def events(folder: Path) -> bytes:
    workload = load_workload("synthetic", WorkloadOptions(groups=1, group_size=2, mean=20, maximum=50, instances=1))
    with EventLog(folder / "events.jsonl", {"source": "fuzz"}) as log:
        simulate(workload, "seer", events=log)
    return b"".join((folder / "events.jsonl").read_bytes().splitlines(keepends=True)[:12])


def results() -> bytes:
    return msgspec.json.encode(a_response(prompt_id="a", index=1, seed=1, num_prompt_tokens=3, started_s=0.5)) + b"\n"


def pool_file() -> bytes:
    with tempfile.TemporaryDirectory() as base:
        config = LocalPoolConfig(block_bytes=4096, dram_bytes=16 * 4096, name="corpus", dram_dir=base, populate=False)
        with LocalPool(config) as pool:
            content = PoolFiles.named("corpus", base).arena.read_bytes()
            pool.close(remove=True)
    return content[:2048]


def handle() -> bytes:
    one = TensorHandle(
        shape=[2],
        stride=[1],
        offset=0,
        dtype="bfloat16",
        device=0,
        memory=bytes(64),
        memory_bytes=8,
        memory_offset_bytes=0,
        counter=b"c",
        counter_offset=0,
        event=None,
        must_wait=False,
    )
    return msgspec.msgpack.encode({"a": one})


def sealed_block() -> bytes:
    block = np.arange(64, dtype=np.uint8)
    row = np.empty(64 + mooncake_record.FOOTER_BYTES, np.uint8)
    mooncake_record.seal(row, block, bytes(32))
    return row.tobytes()


def wire_frames() -> dict[str, bytes]:
    known = Known(1, 0, bytes(8), bytes(4))
    messages: dict[str, Any] = {
        "push": Push(1, 1, [Tail(1, 0, 0, bytes(8))]),
        "register": Register(1, 1, [1, 2], 60.0),
        "fetch": Fetch(1, 1, [known]),
        "drop": Drop(1, 1, [1]),
    }
    return {name: encode(message) for name, message in messages.items()}


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


POINTS = tuple(ProfilePoint(batch, 2, 64, 0.01 * batch, 3, 0.001) for batch in (1, 4))
PROFILE = StepProfile(model="m", device="cpu", dtype="float32", points=POINTS)
STATE = ServeState(backend="local", name="fuzzed", pid=1, pid_started=2, since_unix_s=3.0)
TRACE = as_json({"groups": [[3, 4], [5]], "max_tokens": 8, "prompt_tokens": 3})
PROMPTS = b"""{"prompt": "a", "id": 1, "n": 2, "seed": 3, "temperature": 0.5, "stop_token_ids": [1]}
{"messages": [{"role": "user", "content": "b"}]}
{"prompt_token_ids": [1, 2]}
"""
METRICS = b"# TYPE master_allocated_bytes gauge\nmaster_allocated_bytes 5\nmaster_key_count 2\n"


def corpus(folder: Path) -> dict[str, dict[str, bytes]]:
    """Good inputs by target and name."""
    one: dict[str, bytes] = {
        "host_channel": host_frames(),
        "handshake": first_messages(),
        "journal": journal(),
        "events": events(folder),
        "results": results(),
        "run_json": msgspec.json.encode({"command": "rollout", **recorded(RunConfig()), "status": "running"}),
        "prompts": PROMPTS,
        "configuration": to_toml(RunConfig()).encode(),
        "model_config": as_json(CONFIG | {"rope_scaling": SCALING, "eos_token_id": [1, 2]}),
        "tokenizer": as_json(TOKENIZER),
        "tokenizer_config": as_json({"bos_token": {"content": "a"}, "chat_template": "{{ messages }}"}),
        "weight_index": as_json({"weight_map": {"a": "model.safetensors"}}),
        "safetensors": safetensors_file(),
        "safetensors_header": safetensors_file(),
        "gguf": gguf_file(),
        "recording": npz(GOOD),
        "trace_npz": npz(GOOD),
        "trace_json": TRACE,
        "trace_gz": gzip.compress(TRACE, mtime=0),
        "pooled_block": sealed_block(),
        "gpu_handles": handle(),
        "metrics_page": METRICS,
        "arena": pool_file(),
        "step_profile": msgspec.json.encode(PROFILE),
    }
    note = msgspec.json.encode(Note("run", "/dev/shm/x", 1.0))
    several = {"draft_wire": wire_frames(), "pool_files": {"note": note, "state": msgspec.json.encode(STATE)}}
    return {name: {"good": content} for name, content in one.items()} | several


def main() -> None:
    """Write what differs."""
    with tempfile.TemporaryDirectory() as folder:
        for target, inputs in corpus(Path(folder)).items():
            (CORPUS / target).mkdir(parents=True, exist_ok=True)
            for name, content in inputs.items():
                if target == "arena" and (CORPUS / target / name).exists():
                    continue  # it has random names in it, other ones every time
                (CORPUS / target / name).write_bytes(content)


if __name__ == "__main__":
    main()
