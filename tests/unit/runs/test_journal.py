# SPDX-License-Identifier: Apache-2.0
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from seer.buffer import Request
from seer.errors import InputError, SeerError
from seer.runs.identity import RunIdentity, run_identity
from seer.runs.journal import Journal
from seer.runs.journal_lines import VERSION, Checksums, JournalHeader, JournalLine, JournalSpan
from seer.runs.prompts import EncodedPrompt, Prompt
from seer.types import FinishReason, Group, Sampling, TokenSpan

ME = RunIdentity(settings="me", weights="mine", shape=((2, 50), (2, 50), (2, 50)))


def a_request(index: int = 0) -> Request:
    group = Group(id=2, num_requests=2, num_prompt_tokens=1, sampling=Sampling(max_tokens=50), prompt=[1])
    return Request(index, group, index, 0.0)


def a_span(*ids: int) -> TokenSpan:
    return TokenSpan(list(ids), [-0.1 * i for i in ids], 0)


def ids(journal: Journal, index: int = 0) -> list[int]:
    return [token for span in journal.restored()[(2, index)].spans for token in span.ids]


def a_journal(path: Path) -> list[bytes]:
    """Two requests of three chunks each, in turns; returns the lines."""
    journal = Journal.create(path, ME)
    requests = [a_request(0), a_request(1)]
    for chunk in range(3):
        for request in requests:
            request.spans.append(a_span(10 * chunk + request.index, 5))
            if chunk == 2:
                request.finish_reason = FinishReason.STOP
            journal.record(request)
    journal.close()
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_recorded_is_restored_to_the_last_bit(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "j", ME)
    request = a_request()
    request.spans = [a_span(1, 2)]
    journal.record(request)
    request.spans.append(TokenSpan([3], [-0.1 * 3], 0, [-0.7]))
    journal.record(request)
    journal.record(request)  # nothing new, nothing written
    request.finish_reason = FinishReason.STOP
    journal.record(request)
    journal.close()

    again = Journal.resume(tmp_path / "j", ME)
    past = again.restored()[(2, 0)]
    assert ids(again) == [1, 2, 3]
    assert [list(span.logprobs) for span in past.spans] == [[-0.1, -0.2], [-0.1 * 3]]
    assert [span.raw_logprobs for span in past.spans] == [None, [-0.7]]
    assert past.finish_reason is FinishReason.STOP
    assert len((tmp_path / "j").read_bytes().splitlines()) == 4
    again.close()


def test_responses_without_log_probabilities_are_restored_without(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "j", ME)
    request = a_request()
    request.spans = [TokenSpan([1, 2], (), 0), TokenSpan([3], (), 0, is_given=True), TokenSpan([4], (), 0)]
    journal.record(request)
    journal.close()
    again = Journal.resume(tmp_path / "j", ME)
    spans = again.restored()[(2, 0)].spans
    assert [(list(s.ids), list(s.logprobs), s.raw_logprobs, s.is_given) for s in spans] == [
        ([1, 2], [], None, False),
        ([3], [], None, True),
        ([4], [], None, False),
    ]
    again.close()


def test_a_resumed_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "j", ME)
    request = a_request()
    request.spans = [a_span(1)]
    journal.record(request)
    journal.close()
    second = Journal.resume(tmp_path / "j", ME)
    request.spans.append(a_span(2))
    second.record(request)
    second.close()
    third = Journal.resume(tmp_path / "j", ME)
    assert ids(third) == [1, 2]
    third.close()
    offsets = [json.loads(line)["offset"] for line in (tmp_path / "j").read_bytes().splitlines()[1:]]
    assert offsets == [0, 1]


def test_a_torn_last_line_is_dropped_when_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal.create(path, ME)
    for index in (0, 1):
        request = a_request(index)
        request.spans = [a_span(1, 2, 3)]
        journal.record(request)
    journal.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        torn = Journal.resume(path, ME)
        assert list(torn.restored()) == [(2, 0)]
        assert path.read_bytes() == whole[:-cut]
        request = a_request(1)
        request.spans = [a_span(9)]
        torn.record(request)
        torn.close()
        mended = Journal.resume(path, ME)
        assert ids(mended, 1) == [9]
        mended.close()


def test_any_first_lines_of_a_journal_are_a_journal(tmp_path: Path) -> None:
    lines = a_journal(tmp_path / "j")
    for num_lines in range(1, len(lines) + 1):
        (tmp_path / "j").write_bytes(b"".join(lines[:num_lines]))
        journal = Journal.resume(tmp_path / "j", ME)
        assert sum(len(span.ids) for one in journal.restored().values() for span in one.spans) == 2 * (num_lines - 1)
        journal.close()


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("damage", ["doubled", "missing", "moved", "changed", "emptied", "padded"])
def test_no_whole_line_may_be_damaged_wherever_it_is(tmp_path: Path, damage: str, number: int) -> None:
    path = tmp_path / "j"
    old = a_journal(path)
    line = old[number]
    new = {
        "doubled": [*old[: number + 1], *old[number:]],
        "missing": [*old[:number], *old[number + 1 :]],
        "moved": [*old[:number], *old[number + 1 :], line],
        "changed": [*old[:number], line.replace(b"5", b"6"), *old[number + 1 :]],
        "emptied": [*old[:number], b"\n", *old[number + 1 :]],
        "padded": [*old[:number], b" " + line, *old[number + 1 :]],
    }[damage]
    if number == 6 and damage in ("missing", "moved"):
        return  # as if it had never been written, and as it was
    if new == old:
        new[number] = line.replace(b'"m', b'"M')
    path.write_bytes(b"".join(new))
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"line \d+|not a journal"):
        Journal.resume(path, ME)
    assert path.read_bytes() == before


def test_every_single_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = b"".join(a_journal(path))
    for position in range(0, len(whole) - 1, 3):
        changed = bytearray(whole)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(InputError):
            Journal.resume(path, ME)


def forged(path: Path, *lines: JournalLine, version: int = VERSION) -> Path:
    """A journal whose checksums are right."""
    checksums = Checksums()
    header = JournalHeader(version, ME.settings, ME.weights)
    whole: list[JournalHeader | JournalLine] = [header, *lines]
    path.write_bytes(b"".join(checksums.sealed(line) for line in whole))
    return path


def a_line(offset: int = 0, *tokens: int, reason: FinishReason | None = None, group: int = 2) -> JournalLine:
    return JournalLine(group, 0, offset, [JournalSpan(list(tokens), [0.0] * len(tokens), 0)], reason)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([a_line(0, 1, 2), a_line(1, 2, 3)], r"line 3: response 0 of prompt 2 goes on at token 1, and has 2"),
        ([a_line(3, 1)], "line 2: response 0 of prompt 2 goes on at token 3, and has 0"),
        ([a_line(0, 1, reason=FinishReason.STOP), a_line(1, 2)], "line 3: response 0 of prompt 2 had ended"),
        ([a_line(0, *[1] * 51)], "51 tokens of response 0 of prompt 2, which has 2 responses of at most 50"),
        ([a_line(0, 1, group=3)], "prompt 3, which has 0 responses"),
        ([a_line(0, 1, reason=FinishReason.LENGTH)], "1 tokens of response 0"),
    ],
)
def test_what_is_impossible_is_refused_though_its_checksums_are_right(
    tmp_path: Path, lines: list[JournalLine], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        Journal.resume(forged(tmp_path / "j", *lines), ME)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"group": -1}, "line 2"),
        ({"offset": "0"}, "line 2"),
        ({"spans": [{"ids": [1], "logprobs": [], "weights_version": 0}]}, "1 tokens and 0 log-probabilities"),
        ({"spans": [{"ids": [-1], "logprobs": [0.0], "weights_version": 0}]}, "line 2"),
        ({"finish_reason": "failed"}, "finish_reason 'failed'"),
        ({"finish_reason": "bored"}, "line 2"),
    ],
)
def test_lines_of_wrong_types_are_refused_though_their_checksums_are_right(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    class AnyLine(msgspec.Struct, tag="chunk"):
        group: object
        index: object
        offset: object
        spans: object
        finish_reason: object

    fields: dict[str, object] = {"group": 2, "index": 0, "offset": 0, "spans": [], "finish_reason": None}
    with pytest.raises(InputError, match=why):
        Journal.resume(forged(tmp_path / "j", AnyLine(**fields | changes)), ME)  # type: ignore[arg-type]


def test_another_run_s_journal_and_other_files_are_refused(tmp_path: Path) -> None:
    Journal.create(tmp_path / "j", ME).close()
    with pytest.raises(InputError, match="another engine, prompts"):
        Journal.resume(tmp_path / "j", RunIdentity(settings="you", weights="mine"))
    with pytest.raises(InputError, match="other weights"):
        Journal.resume(tmp_path / "j", RunIdentity(settings="me", weights="yours"))
    with pytest.raises(InputError, match="cannot be read"):
        Journal.resume(tmp_path / "absent", ME)
    for text in ("hello\n", "", "{}\n", '{"type":"seer-journal"}\n', "\xff\n"):
        (tmp_path / "other").write_text(text)
        with pytest.raises(InputError, match="not a journal"):
            Journal.resume(tmp_path / "other", ME)


def test_journals_of_other_versions_are_refused_by_number(tmp_path: Path) -> None:
    (tmp_path / "old").write_text('{"type":"seer-journal","version":1,"identity":"x"}\n')
    for path, version in ((tmp_path / "old", 1), (forged(tmp_path / "new", version=VERSION + 1), VERSION + 1)):
        with pytest.raises(InputError, match=f"version {version} of the format, this Seer reads {VERSION}"):
            Journal.resume(path, ME)


def test_a_full_disk_leaves_a_journal_that_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.create(tmp_path / "j", ME)
    request = a_request()
    request.spans = [a_span(1, 2)]
    journal.record(request)
    write = os.write

    def part(file: int, data: memoryview) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write(file, data[: len(data) // 2])

    request.spans.append(a_span(3))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", part)
        with pytest.raises(SeerError, match="No space left on device"):
            journal.record(request)
    journal.record(request)  # the disk has room again, but a part of a line is in the file
    journal.close()
    again = Journal.resume(tmp_path / "j", ME)
    assert ids(again) == [1, 2]
    again.record(request)
    again.close()
    third = Journal.resume(tmp_path / "j", ME)
    assert ids(third) == [1, 2, 3]
    third.close()


def test_identity_is_what_decides_tokens(tmp_path: Path) -> None:
    def one(**changes: object) -> EncodedPrompt:
        sampling = Sampling(max_tokens=5, **changes)  # type: ignore[arg-type]
        return EncodedPrompt(Prompt(text="a", id="0"), (1, 2), sampling, 4)

    def identity(prompt: EncodedPrompt | None = None, **changes: Any) -> RunIdentity:
        settings = {"engine": "local", "dtype": "float32", "weights": None, "seed": 0}
        return run_identity([prompt or one()], **settings | changes)

    same = identity()
    assert same == identity()
    (tmp_path / "w").write_bytes(b"weights")
    others = {
        identity(engine="vllm"),
        identity(dtype="bfloat16"),
        identity(weights=tmp_path / "w"),
        identity(seed=1),
        identity(one(top_p=0.5)),
        identity(lengths=[[1, 2, 3, 4]]),
    }
    assert same not in others
    assert len(others) == 6
