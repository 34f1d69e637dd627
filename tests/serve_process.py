# SPDX-License-Identifier: Apache-2.0
"""A real `seer serve` process, and a tiny model with a tokenizer of ASCII characters and a chat template for it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from commands import DEADLINE_S, a_command
from seer.engine.local.tiny import make_tiny_model

CHAT_TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
SMALL = ("--set", "rollout.kv.blocks=512", "--set", "rollout.kv.block_size=4", "--max-num-seqs", "8", "--no-pin")


def make_served_model(folder: Path) -> Path:
    """The tiny model, with which texts of ASCII characters can be encoded; its token 2 ends a response."""
    make_tiny_model(folder)
    letters = Tokenizer(models.BPE(vocab={chr(i): i for i in range(128)}, merges=[]))
    letters.decoder = decoders.Fuse()
    letters.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


@dataclass(frozen=True)
class ServeProcess:
    """A server that is ready."""

    url: str
    process: subprocess.Popen[str]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def a_serve_process(*words: str) -> Iterator[ServeProcess]:
    process = a_command("serve", "--port", "0", "--json", *words)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield ServeProcess(json.loads(line)["url"], process)
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)
