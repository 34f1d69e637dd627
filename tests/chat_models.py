# SPDX-License-Identifier: Apache-2.0
"""Tokenizer folders with chat templates, small enough to be made in a test: bytes, and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|end_head|>")

CHATML = """{%- if tools %}<|im_start|>system
You may call these tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen2.5 and SmolLM2 have it."""

HEADERS = """{{ bos_token }}{% for message in messages %}<|head|>{{ message.role }}<|end_head|>

{{ message.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|end_head|>

{% endif %}"""
"""As Llama 3 has it."""

THINKING = """{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == "user" %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}
{%- if message.role == "tool" %}{{ "<|im_start|>user\\n<tool_response>\\n" + message.content }}
{{- "\\n</tool_response><|im_end|>\\n" }}
{%- elif message.role == "assistant" and loop.index0 > ns.last and loop.last %}
{{- "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" + message.content + "<|im_end|>\\n" }}
{%- else %}{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{%- endif %}"""
"""As Qwen3 has it: what it makes of an assistant's message depends on what follows."""

TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "headers": (HEADERS, "<|eot|>"), "thinking": (THINKING, "<|im_end|>")}


def make_tokenizer(folder: Path, template: str, *, eos: str, **config: Any) -> PreTrainedTokenizerFast:
    """Write a tokenizer of bytes into a folder; returns transformers' reading of it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i + len(SPECIAL) for i, letter in enumerate(alphabet)}
    made = Tokenizer(models.BPE({**{name: i for i, name in enumerate(SPECIAL)}, **vocabulary}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": eos} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    read: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return read
