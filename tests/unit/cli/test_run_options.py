# SPDX-License-Identifier: Apache-2.0
"""Options, files and presets of the commands that run instances; `--dry-run` starts nothing."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from seer.cli.main import build_parser, main
from seer.cli.rollout_options import CONFIG_PREFIX
from seer.cli.run_config import read_run
from seer.config import RunConfig, build_run, preset


def asked(*words: str, verb: str = "rollout") -> RunConfig:
    return read_run(build_parser().parse_args([verb, *words]))


def a_file(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_without_options_the_defaults_are_those_of_the_configuration() -> None:
    assert asked() == asked(verb="compare") == RunConfig()


def test_options_override_the_file_and_the_file_overrides_the_preset(tmp_path: Path) -> None:
    path = a_file(tmp_path, 'n = 3\n[sampling]\nmax_tokens = 99\ntemperature = 0.5\n[rollout]\nmodel = "from-file"\n')
    config = asked("--preset", "one-gpu", "--config", path, "--max-tokens", "7", "--no-pin")
    assert (config.n, config.sampling.max_tokens, config.sampling.temperature) == (3, 7, 0.5)
    assert (config.rollout.model, config.rollout.device) == ("from-file", "cuda")
    assert config.rollout.hosting.pin_cores is False


def test_set_reaches_every_key_and_comes_last(tmp_path: Path) -> None:
    words = ["--n", "3", "--set", "n=4", "--set", "rollout.kv.blocks=512", "--set", "rollout.model=org/name"]
    config = asked(*words, "--set", "rollout.hosting.weights_in_place=false")
    assert (config.n, config.rollout.kv.blocks, config.rollout.model) == (4, 512, "org/name")
    assert config.rollout.hosting.weights_in_place is False


def test_compare_takes_its_schedulers_from_the_same_file(tmp_path: Path) -> None:
    path = a_file(tmp_path, '[compare]\nschedulers = ["verl", "seer"]\nrepeat = 2\n')
    config = asked("--config", path, "--repeat", "3", verb="compare")
    assert (config.compare.schedulers, config.compare.repeat) == (("verl", "seer"), 3)
    assert asked("--schedulers", "seer, group", verb="compare").compare.schedulers == ("seer", "group")


def test_every_option_sets_a_key_that_exists() -> None:
    for verb in ("rollout", "compare"):
        parser = build_parser()._subparsers._group_actions[0].choices[verb]  # type: ignore[union-attr,index]
        keys = [a.dest.removeprefix(CONFIG_PREFIX) for a in parser._actions if a.dest.startswith(CONFIG_PREFIX)]
        assert len(keys) > 20
        for key in keys:
            found: Any = RunConfig()
            for name in key.split("."):
                found = getattr(found, name)


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["--set", "rollout.kv.bloks=1"], "--set: unknown key rollout.kv.bloks", "did you mean blocks?"),
        (["--set", "n="], "--set n= has no value", "--set rollout.kv.blocks=512"),
        (["--config", "absent.toml"], "absent.toml cannot be read: No such file or directory", None),
        (["--instances", "0"], "instances=0 is out of range", "use 1 to 1,024"),
        (["--scheduler", "sear"], "unknown scheduler", "did you mean seer?"),
    ],
)
def test_mistakes_are_one_line_with_a_hint(
    words: list[str], error: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "--engine", "fake", "--dry-run", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert error in lines[0]
    assert hint is None or hint in lines[1]


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["rollout", "--engine", "fake", "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_a_dry_run_prints_toml_that_runs_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = dry_run(capsys, "--instances", "3", "--n", "5")
    config = build_run(tomllib.loads(shown))
    assert (config.n, config.rollout.instances, config.rollout.max_num_seqs) == (5, 3, 16)
    again = dry_run(capsys, "--config", a_file(tmp_path, shown))
    assert build_run(tomllib.loads(again)) == config


def test_a_dry_run_counts_the_prompts_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [1, 2]}\n' * 2)
    shown = dry_run(capsys, "--prompts", "p.jsonl", "--n", "3")
    assert "# prompts           2, 6 responses" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_a_dry_run_for_machines_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(dry_run(capsys, "--json", "--preset", "eight-gpus"))
    assert build_run(shown["config"]).rollout.instances == 8
    assert shown["memory_plan"]["num_instances"] == 8
    assert shown["memory_plan"]["num_on_device"] == 1


def test_the_demo_is_the_preset() -> None:
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    line = next(line for line in makefile.splitlines() if "seer compare" in line)
    words = line.split("seer compare", 1)[1].split()
    prompts = Path("examples/prompts/mixed.jsonl")
    assert asked(*words, verb="compare") == build_run({"prompts": str(prompts)}, base=preset("cpu-demo"))
