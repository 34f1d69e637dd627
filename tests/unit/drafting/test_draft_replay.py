# SPDX-License-Identifier: Apache-2.0
"""The offline replay and its command, on ten recorded groups (Game of 24; MIT, Tree-of-Thoughts logs)."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from seer.cli import drafts
from seer.drafting.index import Draft, DraftOptions
from seer.drafting.offline_replay import accepted_path, replay
from seer.drafting.recording import RecordedGroup, read_groups
from seer.errors import ConfigError, InputError

RECORDING = Path(__file__).parent / "game24_10.npz"


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def run_command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    drafts.register(parser.add_subparsers())
    args = parser.parse_args(["drafts", "replay", *words])
    return int(args.run(args))


def test_the_accepted_path_follows_the_truth_through_the_tree() -> None:
    draft = Draft(ints(1, 2, 3, 4, 5), ints(-1, -1, 1, 1, 3), np.ones(5, np.float32))
    assert accepted_path(draft, ints(2, 4, 5, 9)) == [1, 3, 4]
    assert accepted_path(draft, ints(2, 4)) == [1, 3]
    assert accepted_path(draft, ints(7)) == []


def test_an_exact_sibling_is_accepted_whole() -> None:
    text = np.arange(40, dtype=np.int32)
    group = RecordedGroup(ints(), (text, text))
    result = replay([group], references=1, budget=9, options=DraftOptions())
    assert (result.steps, result.tokens, result.mean_accepted) == (4, 40, 10.0)


def test_without_siblings_every_first_token_costs_a_step() -> None:
    group = RecordedGroup(ints(), (np.arange(40, dtype=np.int32),))
    assert replay([group], references=0, budget=8, options=DraftOptions()).mean_accepted == 1.0


def test_acceptance_on_recorded_groups_does_not_get_worse() -> None:
    groups = read_groups(RECORDING)
    floors = {(0, 1): 1.40, (0, 4): 1.55, (15, 1): 5.37, (15, 4): 5.45}
    for (references, paths), floor in floors.items():
        options = DraftOptions(paths=paths)
        assert replay(groups, references=references, budget=8, options=options).mean_accepted >= floor


def test_the_command_prints_the_promised_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(str(RECORDING), "--references", "0,5", "--paths", "1,2", "--budget", "4", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["references"], row["paths"], row["budget"]) for row in rows] == [
        (0, 1, 4),
        (0, 2, 4),
        (5, 1, 4),
        (5, 2, 4),
    ]
    assert all(1.0 <= row["mean_accepted"] <= 5.0 and 0 <= row["drafted_per_step"] <= 4 for row in rows)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(str(RECORDING), "--references", "0", "--paths", "1,2") == 0
    assert "2 paths" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("--references", "16"),
        ("--references", "many"),
        ("--paths", "0"),
        ("--budget", "0"),
        ("--min-confidence", "2"),
    ],
)
def test_a_bad_option_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises((InputError, ConfigError, SystemExit)):
        run_command(str(RECORDING), *words)


def test_a_bad_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_groups(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("not a recording")
    with pytest.raises(InputError, match=r"not an \.npz archive"):
        read_groups(tmp_path / "text.npz")
    np.savez(tmp_path / "half.npz", lengths=ints(2, 3))
    with pytest.raises(InputError, match="no array"):
        read_groups(tmp_path / "half.npz")
    np.savez(tmp_path / "short.npz", lengths=ints(2, 3), group_sizes=ints(2), tokens=ints(1, 2, 3))
    with pytest.raises(InputError, match="add up"):
        read_groups(tmp_path / "short.npz")
    np.savez(tmp_path / "negative.npz", lengths=ints(2), group_sizes=ints(1), tokens=ints(1, -2))
    with pytest.raises(InputError, match="no token id"):
        read_groups(tmp_path / "negative.npz")


def test_lengths_in_two_dimensions_stand_for_group_sizes(tmp_path: Path) -> None:
    lengths = np.array([[1, 2], [3, 1]], np.int32)
    np.savez(tmp_path / "square.npz", lengths=lengths, tokens=np.arange(7, dtype=np.uint16))
    groups = read_groups(tmp_path / "square.npz")
    assert [[response.tolist() for response in group.responses] for group in groups] == [
        [[0], [1, 2]],
        [[3, 4, 5], [6]],
    ]
