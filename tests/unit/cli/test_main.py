# SPDX-License-Identifier: Apache-2.0
"""The command itself: exit codes, and errors in one line with a hint."""

import argparse

import pytest

from seer.cli import main as cli
from seer.cli.reference import verbs_of
from seer.errors import ConfigError, InputError, InstanceError, MissingExtra


def run_that(effect: BaseException | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `seer simulate` do this."""

    def run(args: argparse.Namespace) -> int:
        if isinstance(effect, int):
            return effect
        raise effect

    def build() -> cli.Parser:
        parser = cli.Parser(prog="seer")
        verbs = parser.add_subparsers(dest="verb", required=True)
        verbs.add_parser("simulate").set_defaults(run=run)
        return parser

    monkeypatch.setattr(cli, "build_parser", build)


@pytest.mark.parametrize(
    ("effect", "code", "stderr"),
    [
        (0, 0, ""),
        (ConfigError("bad", hint="try this"), 2, "error: bad\nhint: try this\n"),
        (InputError("bad file"), 2, "error: bad file\n"),
        (
            MissingExtra("torch", "local"),
            2,
            "error: torch is not installed\nhint: pip install 'seer-rollout[local]'\n",
        ),
        (InstanceError("it died"), 1, "error: it died\n"),
        (InstanceError("two\nlines"), 1, "error: two lines\n"),
        (KeyboardInterrupt(), 130, "error: interrupted by SIGINT\n"),
    ],
)
def test_errors_become_a_line_and_an_exit_code(
    effect: BaseException | int,
    code: int,
    stderr: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_that(effect, monkeypatch)
    assert cli.main(["simulate"]) == code
    assert capsys.readouterr() == ("", stderr)


def test_a_bug_is_one_line_too_and_says_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_that(ValueError("oops"), monkeypatch)
    assert cli.main(["simulate"]) == 1
    assert capsys.readouterr().err.startswith("error: ValueError: oops\nhint: this is a bug; --debug")


@pytest.mark.parametrize("words", [["--debug", "simulate"], ["simulate", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run_that(ConfigError("bad"), monkeypatch)
    with pytest.raises(ConfigError):
        cli.main(words)


@pytest.mark.parametrize("words", [[], ["nonsense"], ["simulate"], ["simulate", "moonlight", "--instances", "x"]])
def test_misuse_exits_with_2_and_says_where_to_look(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"]


def test_an_unknown_option_points_at_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "moonlight", "--polices", "seer"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "hint: see `seer simulate --help`"


VERBS = [name.split()[1:] for name, _ in verbs_of(cli.build_parser())]


@pytest.mark.parametrize("verb", [[], *VERBS], ids=" ".join)
def test_help_teaches_with_examples_in_plain_words(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*verb, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    _, _, examples = shown.partition("examples:\n")
    assert f"  {' '.join(['seer', *verb])}" in examples
    for word in ("nobody", "whoever", " told", "in hand", "aside", "meanwhile"):
        assert word not in shown, word


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("seer ")
