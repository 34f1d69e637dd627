# SPDX-License-Identifier: Apache-2.0
"""A finished run of the local engine on a tiny model with words, and ways to edit the files of its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from seer.cli.main import main
from seer.engine.local.tiny import make_tiny_model

NUM_PROMPTS, N, MAX_TOKENS = 3, 3, 40
VOCABULARY = 128


@dataclass(frozen=True)
class RecordedRun:
    """A run's folder beside the model and the prompts it was made with."""

    home: Path

    @property
    def model(self) -> Path:
        return self.home / "model"

    @property
    def path(self) -> Path:
        return self.home / "run"

    def file(self, name: str) -> Path:
        return self.path / name

    def lines(self, name: str) -> list[bytes]:
        return self.file(name).read_bytes().splitlines(keepends=True)

    def write_lines(self, name: str, lines: list[bytes]) -> None:
        self.file(name).write_bytes(b"".join(lines))

    def manifest(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.file("run.json").read_text())
        return read

    def write_manifest(self, **changes: Any) -> None:
        self.file("run.json").write_text(json.dumps(self.manifest() | changes))

    def responses(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines("results.jsonl")]

    def write_responses(self, responses: list[dict[str, Any]]) -> None:
        self.write_lines("results.jsonl", [json.dumps(one).encode() + b"\n" for one in responses])

    def change_response(self, position: int, **changes: Any) -> None:
        responses = self.responses()
        responses[position] |= changes
        self.write_responses(responses)

    def contents(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.path)): path.read_bytes() for path in self.path.rglob("*") if path.is_file()}

    def copied_to(self, home: Path) -> RecordedRun:
        """A copy with a model of its own, so that the weights can be edited too."""
        shutil.copytree(self.home, home, dirs_exist_ok=True)
        copy = RecordedRun(home)
        manifest = copy.file("run.json")
        manifest.write_text(manifest.read_text().replace(str(self.home), str(home)))
        return copy


def make_run(home: Path, *more: str, **shape: Any) -> RecordedRun:
    """Roll out; `more` are further options, `shape` is the model's."""
    make_tiny_model(home / "model", **shape)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(home / "model" / "tokenizer.json"))
    prompts = home / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"w{3 + i} w7 w11", "id": f"p{i}"}) for i in range(NUM_PROMPTS)]
    prompts.write_text("\n".join(lines) + "\n")
    arguments = ["rollout", "--model", str(home / "model"), "--prompts", str(prompts), "--n", str(N)]
    arguments += ["--max-tokens", str(MAX_TOKENS), "--instances", "1", "--no-pin", "--quiet", "--json"]
    arguments += ["--kv-memory", "4MiB", "--set", "rollout.chunk_tokens=16", "--run-dir", str(home / "run"), *more]
    assert main(arguments) == 0
    return RecordedRun(home)


Damage = Callable[[RecordedRun], object]
