# SPDX-License-Identifier: Apache-2.0
"""Bad model folders, recordings and traces as commands; the first are generated over the types of their fields."""

from __future__ import annotations

import gzip
import io
import json
import typing
import zipfile
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from bad_commands import BadCommand, json_values
from seer.engine.hub_files import GenerationFields, Llama3Scaling, LocalDecoderFields, TokenizerFields
from seer.sim.recorded import _JsonLengths

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NO_JSON = {"empty": b"", "half": b"{", "list": b"[1]", "bytes": b"\xff\xfe", "nested": b"[" * 100_000, "number": b"5"}


def model_cases() -> Iterator[BadCommand]:
    """Every field that is read of the files of a model folder, and files that are no JSON."""
    for key, value, number in _bad_fields(LocalDecoderFields):
        yield _model(f"config.json-{key}-{number}", config=CONFIG | {key: value}, mentions=f"config.json: {key}")
    for key in ("vocab_size", "num_hidden_layers", "intermediate_size", "model_type"):
        yield _model(f"config.json-without-{key}", config={k: v for k, v in CONFIG.items() if k != key}, mentions=key)
    for key, value, number in _bad_fields(Llama3Scaling):
        yield _model(
            f"rope-{key}-{number}",
            config=CONFIG | {"rope_scaling": SCALING | {key: value}},
            mentions=f"rope scaling: {key}",
        )
    for key, value, number in _bad_fields(GenerationFields):
        yield _model(f"generation-{key}-{number}", generation={key: value}, mentions=f"generation_config.json: {key}")
    for key, value, number in _bad_fields(TokenizerFields):
        yield _model(
            f"tokenizer_config-{key}-{number}", tokenizer_config={key: value}, mentions=f"tokenizer_config.json: {key}"
        )
    for name, content in NO_JSON.items():
        for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            yield _model(f"{file}-{name}", raw={file: content}, mentions=file)
        yield _model(f"weights-{name}", raw={"model.safetensors": len(content).to_bytes(8, "little") + content})
    yield _model("weights-header-beyond-the-file", raw={"model.safetensors": (1 << 62).to_bytes(8, "little")})
    yield _model("tokenizer-model", raw={"tokenizer.json": json.dumps(TOKENIZER | {"model": 5}).encode()})
    yield _model("heads-do-not-divide", config=CONFIG | {"num_key_value_heads": 3})
    yield _model("odd-heads", config=CONFIG | {"head_dim": 15})
    yield _model("no-room-for-heads", config=CONFIG | {"hidden_size": 2})


def _bad_fields(kind: type[msgspec.Struct]) -> Iterator[tuple[str, Any, int]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        for number, value in enumerate(json_values(hints[field.name])):
            yield field.encode_name, value, number


def _model(
    name: str,
    *,
    config: dict[str, Any] = CONFIG,
    generation: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    raw: dict[str, bytes] | None = None,
    mentions: str = "",
) -> BadCommand:
    files = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer_config}
    contents = {key: json.dumps(value).encode() for key, value in files.items() if value is not None}
    contents["tokenizer.json"] = json.dumps(TOKENIZER).encode()
    written = {f"model/{key}": content for key, content in (contents | (raw or {})).items()}
    return BadCommand(f"model-{name}", ("rollout", "--model", "model", "--dry-run"), written, mentions=mentions)


GOOD = {
    "lengths": np.array([2, 1, 3]),
    "group_sizes": np.array([2, 1]),
    "tokens": np.arange(6),
    "prompt_lengths": np.array([1, 1]),
    "prompts": np.array([4, 5]),
}
BAD_ARRAYS: dict[str, Any] = {
    "floats": np.array([1.5, 2.5, 3.0]),
    "words": np.array(["a", "b", "c"]),
    "pickled": np.array([{"a": 1}, None, print], dtype=object),
    "negative": np.array([-1, 2, 3]),
    "huge": np.array([1 << 62, 1 << 62, 1 << 62]),
    "beyond": np.array([(1 << 64) - 1, 1, 1], dtype=np.uint64),
    "cube": np.ones((2, 2, 2), dtype=np.int32),
    "scalar": np.array(5),
    "wrong-sum": np.array([7, 7, 7]),
}
COMMANDS = {
    "drafts": (("drafts", "replay", "file.npz"), ("lengths", "group_sizes", "tokens", "prompt_lengths", "prompts")),
    "trace": (("simulate", "trace:file.npz", "--schedulers", "verl"), ("lengths", "group_sizes")),
}


def recording_cases() -> Iterator[BadCommand]:
    """Recordings whose arrays are wrong, and files that are no archives."""
    for verb, (words, names) in COMMANDS.items():
        for name in names:
            for kind, array in BAD_ARRAYS.items():
                if (verb, name, kind) == ("trace", "lengths", "wrong-sum"):
                    continue  # lengths that a trace without tokens may have
                yield BadCommand(
                    f"{verb}-{name}-{kind}", words, {"file.npz": npz(GOOD | {name: array})}, mentions="file.npz"
                )
        yield BadCommand(f"{verb}-nothing-in-it", words, {"file.npz": npz({"other": np.ones(3, np.int32)})})
        for kind, content in damaged_archives().items():
            yield BadCommand(f"{verb}-{kind}", words, {"file.npz": content}, mentions="file.npz")
        yield BadCommand(f"{verb}-absent", words, mentions="file.npz")


def npz(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def damaged_archives() -> dict[str, bytes]:
    """Archives as a cut download, a flipped bit and a liar make them."""
    whole = npz(GOOD)
    flipped = bytearray(whole)
    flipped[200] ^= 0xFF
    lying = npz(GOOD).replace(b"'shape': (3,)", b"'shape': (9" + b"9" * 2 + b",)"[:1])
    return {
        "empty": b"",
        "text": b"not an archive",
        "cut": whole[: len(whole) // 2],
        "flipped": bytes(flipped),
        "lying": _with_member("lengths.npy", b"\x93NUMPY\x01\x00" + _npy_header("(99999999999999,)")),
        "no-header": _with_member("lengths.npy", b"not an array"),
        "huge-header": _with_member("lengths.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff"),
        "negative-shape": _with_member("lengths.npy", b"\x93NUMPY\x01\x00" + _npy_header("(-5,)")),
    } | ({"lying-shape": lying} if lying != whole else {})


def _npy_header(shape: str) -> bytes:
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return len(text).to_bytes(2, "little") + text


def _with_member(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def trace_cases() -> Iterator[BadCommand]:
    """Traces in JSON, packed and not."""
    words = ("simulate", "trace:file.json", "--schedulers", "verl")
    for key, value, number in _bad_fields(_JsonLengths):
        content = json.dumps({"groups": [[3, 4]], "max_tokens": 8} | {key: value}).encode()
        yield BadCommand(f"trace-{key}-{number}", words, {"file.json": content}, mentions="file.json")
    for name, content in NO_JSON.items():
        yield BadCommand(f"trace-{name}", words, {"file.json": content}, mentions="file.json")
        packed = gzip.compress(content, mtime=0)
        yield BadCommand(
            f"trace-gz-{name}", ("simulate", "trace:f.json.gz", "--schedulers", "verl"), {"f.json.gz": packed}
        )
    for name, groups in {"empty": [], "an-empty-group": [[]], "above-max": [[9]], "zero": [[0]]}.items():
        content = json.dumps({"groups": groups, "max_tokens": 8}).encode()
        yield BadCommand(f"trace-groups-{name}", words, {"file.json": content}, mentions="file.json")
    yield BadCommand("trace-gz-cut", ("simulate", "trace:f.json.gz"), {"f.json.gz": gzip.compress(b"{}" * 99)[:20]})
    yield BadCommand("trace-suffix", ("simulate", "trace:file.txt"), {"file.txt": b"{}"})
