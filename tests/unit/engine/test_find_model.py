# SPDX-License-Identifier: Apache-2.0
"""A model by folder, by name, and by Hugging Face id from a cache laid out on disk; no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("huggingface_hub")

from seer.engine.local.models_get import find_model
from seer.engine.local.tiny import make_tiny_model
from seer.errors import InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def a_hub_cache(home: Path, model_id: str) -> Path:
    """A model in the layout of HF_HOME; returns its snapshot."""
    root = home / "hub" / f"models--{model_id.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    (root / "snapshots").mkdir()
    return make_tiny_model(root / "snapshots" / COMMIT)


def seer(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with this Hugging Face cache and no way to the Hub; it reads both when it is imported."""
    environment = dict(os.environ) | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "seer.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_a_hugging_face_id_is_found_in_the_cache_without_a_network(tmp_path: Path) -> None:
    snapshot = a_hub_cache(tmp_path, "some-org/tiny-model")
    done = seer("rollout", "--model", "some-org/tiny-model", "--dry-run", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f'model = "{snapshot.resolve()}"' in done.stdout


def test_an_id_that_is_not_in_the_cache_is_refused_with_what_to_do(tmp_path: Path) -> None:
    done = seer("model", "show", "some-org/absent", home=tmp_path)
    assert done.returncode == 2
    assert "some-org/absent is not a folder here, not in the Hugging Face cache" in done.stderr
    assert "hint: with a connection: hf download some-org/absent" in done.stderr


@pytest.mark.parametrize("name", ["nothing", "/not/there", "a/b/c", "../x"])
def test_what_is_neither_a_folder_nor_an_id_nor_a_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="there is no model") as caught:
        find_model(name)
    assert caught.value.hint == ("a folder with config.json, a Hugging Face id (org/name), or one of smollm2, tiny")


def test_a_folder_that_looks_like_an_id_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "org" / "name")
    assert find_model("org/name") == Path("org/name")
