# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from seer.buffer import Request
from seer.errors import InputError
from seer.runs.journal import Journal, run_identity
from seer.runs.prompts import EncodedPrompt, Prompt
from seer.types import FinishReason, Group, Sampling, TokenSpan


def a_request(index: int = 0) -> Request:
    group = Group(id=2, num_requests=2, num_prompt_tokens=1, sampling=Sampling(max_tokens=50), prompt=[1])
    return Request(index, group, index, 0.0)


def a_span(*ids: int) -> TokenSpan:
    return TokenSpan(list(ids), [-0.1 * i for i in ids], 0)


def ids(journal: Journal, index: int = 0) -> list[int]:
    return [token for span in journal.restored()[(2, index)].spans for token in span.ids]


def test_what_was_recorded_is_restored_to_the_last_bit(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "j", "me")
    request = a_request()
    request.spans = [a_span(1, 2)]
    journal.record(request)
    request.spans.append(a_span(3))
    journal.record(request)
    journal.record(request)  # nothing new, nothing written
    request.finish_reason = FinishReason.STOP
    journal.record(request)
    journal.close()

    again = Journal.resume(tmp_path / "j", "me")
    past = again.restored()[(2, 0)]
    assert ids(again) == [1, 2, 3]
    assert [list(span.logprobs) for span in past.spans] == [[-0.1, -0.2], [-0.1 * 3]]
    assert past.finish_reason is FinishReason.STOP
    assert len((tmp_path / "j").read_bytes().splitlines()) == 4
    again.close()


def test_a_resumed_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "j", "me")
    request = a_request()
    request.spans = [a_span(1)]
    journal.record(request)
    journal.close()
    second = Journal.resume(tmp_path / "j", "me")
    request.spans.append(a_span(2))
    second.record(request)
    second.close()
    third = Journal.resume(tmp_path / "j", "me")
    assert ids(third) == [1, 2]
    third.close()


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal.create(path, "me")
    for index in (0, 1):
        request = a_request(index)
        request.spans = [a_span(1, 2, 3)]
        journal.record(request)
    journal.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        torn = Journal.resume(path, "me")
        assert list(torn.restored()) == [(2, 0)]
        request = a_request(1)
        request.spans = [a_span(9)]
        torn.record(request)
        torn.close()
        mended = Journal.resume(path, "me")
        assert ids(mended, 1) == [9]
        mended.close()


def test_another_run_s_journal_and_other_files_are_refused(tmp_path: Path) -> None:
    Journal.create(tmp_path / "j", "me").close()
    with pytest.raises(InputError, match="another model, prompts"):
        Journal.resume(tmp_path / "j", "you")
    with pytest.raises(InputError, match="cannot be read"):
        Journal.resume(tmp_path / "absent", "me")
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(InputError, match="not a journal"):
        Journal.resume(tmp_path / "other", "me")


def test_damage_in_the_middle_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal.create(path, "me").close()
    path.write_bytes(path.read_bytes() + b'{"type":"chunk"}\n')
    with pytest.raises(InputError, match="line 2"):
        Journal.resume(path, "me")


def test_identity_is_what_decides_tokens() -> None:
    def one(**changes: object) -> EncodedPrompt:
        sampling = Sampling(max_tokens=5, **changes)  # type: ignore[arg-type]
        return EncodedPrompt(Prompt(text="a", id="0"), (1, 2), sampling, 4)

    same = run_identity("m", [one()], 0)
    assert same == run_identity("m", [one()], 0)
    others = {
        run_identity("n", [one()], 0),
        run_identity("m", [one()], 1),
        run_identity("m", [one(top_p=0.5)], 0),
    }
    assert same not in others
    assert len(others) == 3
