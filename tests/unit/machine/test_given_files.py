# SPDX-License-Identifier: Apache-2.0
"""Files that users name: pipes and devices are refused at once or read to a limit, whatever reads them."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import seer
from seer.cli.main import main
from seer.config import read_config_file
from seer.engine.hub_files import read_config_object
from seer.engine.local.gguf_file import GgufFile
from seer.engine.local.tokenizer import Tokenizer
from seer.engine.local.weights import open_weights
from seer.errors import InputError, SeerError
from seer.machine.given_files import check_given, open_given, read_given
from seer.machine.json_files import read_object
from seer.machine.npz_files import read_integers
from seer.machine.safetensors_header import read_header
from seer.metrics.jsonl import read_events
from seer.report.training import read_training
from seer.runs.journal_lines import read_journal
from seer.runs.prompts import read_prompts
from seer.runs.results import read_responses
from seer.runs.run_folder import RunFolder
from seer.runs.weights_identity import weights_identity
from seer.sim.recorded import read_lengths
from seer.sim.replay import read_recording
from seer.speculation.step_profile import StepProfile

PROMPT = b'{"prompt_token_ids": [1, 2, 3]}\n'
READERS: dict[str, Callable[[Path], Any]] = {
    "run.toml": read_config_file,
    "events.jsonl": lambda path: list(read_events(path)),
    "simulated.jsonl": read_recording,
    "journal.jsonl": read_journal,
    "results.jsonl": lambda path: list(read_responses(path)),
    "run.json": lambda path: RunFolder(path.parent).read_manifest(),
    "config.json": lambda path: read_config_object(path.parent),
    "tokenizer.json": lambda path: Tokenizer(path.parent),
    "anything.json": read_object,
    "profile.json": StepProfile.load,
    "model.safetensors": open_weights,
    "header.safetensors": read_header,
    "model.gguf": GgufFile,
    "lengths.json": read_lengths,
    "lengths.json.gz": read_lengths,
    "lengths.npz": lambda path: read_integers(path, ["lengths"], hint=""),
    "a.safetensors": lambda path: weights_identity(path.parent),
}


def as_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [as_fifo, as_device])
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused_at_once(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / name)
    with pytest.raises(SeerError) as refused:
        READERS[name](tmp_path / name)
    assert name in str(refused.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "vocab.json", "model.safetensors"])
def test_a_model_folder_with_a_pipe_or_a_device_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    as_device(tmp_path / name)
    with pytest.raises(InputError, match=f"{name} is not a regular file"):
        read_config_object(tmp_path)


@pytest.mark.parametrize("make", [as_fifo, as_device])
@pytest.mark.parametrize(
    "words",
    [
        ["rollout", "--engine", "fake", "--config", "FILE"],
        ["replay", "FILE"],
        ["report", "RUN"],
        ["rollout", "--resume", "RUN"],
    ],
    ids=" ".join,
)
def test_commands_refuse_pipes_and_devices(
    words: list[str], make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"FILE": tmp_path / "file", "RUN": tmp_path / "run"}
    places["RUN"].mkdir()
    RunFolder(places["RUN"]).write_manifest({"command": "rollout", "options": {"instances": 1}, "config": {}})
    names = ("events.jsonl", "journal.jsonl", "prompts.jsonl")
    for path in (places["FILE"], *(places["RUN"] / name for name in names)):
        make(path)
    assert main([str(places.get(word, word)) for word in words]) == 2
    assert "bug" not in capsys.readouterr().err


def test_a_training_log_that_is_a_device_is_refused(tmp_path: Path) -> None:
    as_device(tmp_path / "rollouts.jsonl")
    with pytest.raises(InputError):
        read_training(RunFolder(tmp_path))


def test_a_file_beyond_the_limit_is_refused_with_the_figure(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    for read in (read_prompts, read_config_file, read_object, read_journal):
        with pytest.raises(InputError, match=r"large has 1\.0 TiB"):
            read(tmp_path / "large")
    with pytest.raises(InputError, match=r"large has 1\.0 TiB"):
        check_given(tmp_path / "large", limit_bytes=10)


def test_a_line_without_an_end_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seer.metrics.jsonl.MAX_LINE_BYTES", 1000)
    with (tmp_path / "events.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="is not an event log"):
        list(read_events(tmp_path / "events.jsonl"))


@pytest.fixture
def piped() -> Iterator[Callable[[bytes], Path]]:
    """A pipe as `<(...)` of a shell makes it: a path among the descriptors of this process."""
    ends: list[int] = []

    def make(content: bytes) -> Path:
        read, write = os.pipe()
        ends.append(read)

        def fill() -> None:
            with os.fdopen(write, "wb") as file:
                file.write(content)

        threading.Thread(target=fill).start()
        return Path(f"/dev/fd/{read}")

    yield make
    for end in ends:
        os.close(end)


def test_prompts_may_come_through_a_pipe_and_are_kept_whole(piped: Callable[[bytes], Path], tmp_path: Path) -> None:
    content = PROMPT * 5000  # more than a pipe holds
    path = piped(content)
    good, bad = read_prompts(path)
    assert (len(good), len(bad)) == (5000, 0)
    RunFolder(tmp_path / "run").create(path)
    assert (tmp_path / "run/prompts.jsonl").read_bytes() == content


def test_a_pipe_is_read_to_the_limit(piped: Callable[[bytes], Path]) -> None:
    with pytest.raises(InputError, match="gives more than 10 B, the limit"):
        read_given(piped(b"x" * 11), limit_bytes=10, may_be_pipe=True)


def test_prompts_from_a_fifo_that_nobody_writes_are_none(tmp_path: Path) -> None:
    as_fifo(tmp_path / "p.jsonl")
    with pytest.raises(InputError, match="holds no prompt"):
        read_prompts(tmp_path / "p.jsonl")
    as_device(tmp_path / "zero.jsonl")
    with pytest.raises(InputError, match="is not a regular file"):
        read_prompts(tmp_path / "zero.jsonl")


def test_links_and_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_given(tmp_path / "link", limit_bytes=3) == b"abc"
    with open_given(tmp_path / "link") as file:
        assert os.get_blocking(file.fileno())
    with pytest.raises(IsADirectoryError):
        read_given(tmp_path, limit_bytes=3)


OWN_READERS = {
    "machine/given_files.py",
    "machine/private_files.py",
    "machine/cores.py",
    "machine/memory.py",
    "machine/npz_files.py",
    "serve/keys.py",
    "kvpool/supervise.py",
    "kvpool/mooncake_servers.py",
    "hosting/starvation.py",
    "runs/run_lock.py",
    "engine/local/models_get.py",
}
"""Modules that open files in another way: of the system, of Seer's own processes, or with checks of their own."""


def test_every_other_module_reads_files_through_the_one_opener() -> None:
    home = Path(seer.__file__).parent
    found = set()
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _reads(ast.unparse(node.func), ast.unparse(node)):
                found.add(str(path.relative_to(home)))
    assert sorted(found - OWN_READERS) == []


def _reads(function: str, call: str) -> bool:
    if any(word in call for word in ("/proc/", "files('seer", "/sys/")):
        return False
    is_open = function == "open" or function.endswith(".open")
    return function.endswith((".read_bytes", ".read_text")) or (is_open and "'rb'" in call)
