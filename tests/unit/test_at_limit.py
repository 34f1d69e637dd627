# SPDX-License-Identifier: Apache-2.0
"""Whether many responses end at their limit: which of them count, when it is judged, and what is carried on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import a_group, end, requests_of
from seer.at_limit import LEAST_ENDED, LIMIT_SHARE, LimitCount

LIMIT = 4096


def end_many(count: LimitCount, num: int, num_at_limit: int, limit: int = LIMIT) -> None:
    """So many responses end, the ones at their limit last."""
    for at in range(num):
        end_one(count, limit, limit if at >= num - num_at_limit else limit // 3)


def end_one(count: LimitCount, limit: int, num_tokens: int) -> None:
    (request,) = requests_of(a_group(0, 1, max_tokens=limit))
    end(request, num_tokens)
    count.observe(request)


@pytest.mark.parametrize(("num_at_limit", "binds"), [(0, False), (2, False), (6, True), (84, True)])
def test_the_limit_binds_where_many_responses_end_there(num_at_limit: int, binds: bool) -> None:
    assert 2 < 100 * LIMIT_SHARE < 6
    count = LimitCount()
    assert not count.binds
    end_many(count, 84, num_at_limit)
    end_many(count, 16, 0)  # more than an eighth, so that it is judged
    assert count.binds is binds


def test_of_few_responses_nothing_is_said() -> None:
    count = LimitCount()
    end_many(count, LEAST_ENDED - 1, LEAST_ENDED - 1)
    assert not count.binds
    end_many(count, 1, 1)
    assert count.binds


def test_it_is_judged_after_an_eighth_more() -> None:
    count = LimitCount()
    end_many(count, 80, 0)
    judged = []
    for _ in range(20):
        end_many(count, 1, 1)
        judged.append(count.binds)
    assert judged.index(True) >= 3, "the third of eighty is enough, and is not looked at at once"
    assert judged == sorted(judged)


@pytest.mark.parametrize("scores_first", [False, True])
@pytest.mark.parametrize("score_tokens", [1, 8, LIMIT // 16])
def test_requests_that_only_score_do_not_count_beside_a_training(scores_first: bool, score_tokens: int) -> None:
    count = LimitCount()
    if scores_first:
        end_many(count, 200, 200, limit=score_tokens)
    for _ in range(10):
        end_many(count, 20, 0)
        end_many(count, 60, 60, limit=score_tokens)
        assert not count.binds
    end_many(count, 40, 40)
    assert count.binds, "those of the training do count"


def test_limits_that_differ_by_less_than_four_count_together() -> None:
    count = LimitCount()
    end_many(count, 100, 0)
    end_many(count, 100, 100, limit=LIMIT // 4)
    assert count.binds


def test_where_longer_limits_begin_to_count_others_are_not_waited_for() -> None:
    count = LimitCount()
    end_many(count, 1000, 1000, limit=1)
    assert count.binds
    end_many(count, 1, 0)
    assert not count.binds
    end_many(count, LEAST_ENDED - 1, 1)
    assert count.binds


def test_a_single_long_limit_is_forgotten_with_the_next_rollout() -> None:
    count = LimitCount()
    end_many(count, 100, 100)
    end_many(count, 1, 0, limit=64 * LIMIT)
    assert not count.binds
    count.fade()
    end_many(count, 1, 1)
    assert count.binds


def test_the_next_rollouts_know_and_forget_within_a_few() -> None:
    count = LimitCount()
    end_many(count, 100, 10)
    count.fade()
    assert count.binds
    for _ in range(5):
        end_many(count, 100, 0)
        count.fade()
    assert not count.binds


def test_a_session_without_an_end_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seer.at_limit.MOST_JUDGED", 200.0)
    count = LimitCount()
    end_many(count, 5_000, 250)
    assert count.binds
    end_many(count, 1_500, 0)
    assert not count.binds


class WholeHistory:
    """The twin: judges from the list of all that have ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, bool]] = []
        self.binds = False
        self.judged: tuple[int, float] = (0, LEAST_ENDED)  # the largest power of two, and when to judge again

    def observe(self, limit: int, num_tokens: int) -> None:
        self.ended.append((limit, num_tokens >= limit))
        power = max(2 ** (len(bin(one)) - 3) for one, _ in self.ended)
        counted = [at_limit for one, at_limit in self.ended if one >= power / 4]
        if power != self.judged[0] or len(counted) >= self.judged[1]:
            self.binds = len(counted) >= LEAST_ENDED and sum(counted) >= LIMIT_SHARE * len(counted)
            self.judged = power, max(LEAST_ENDED, len(counted) * 9 / 8)


@given(
    limits=st.lists(st.integers(1, 40_000), min_size=1, max_size=4),
    one_in=st.sampled_from([1, 3, 20, 50]),
    random=st.randoms(use_true_random=False),
)
def test_it_is_the_share_of_all_that_have_ended_with_a_limit_of_the_largest_sizes(
    limits: list[int], one_in: int, random: object
) -> None:
    count, twin = LimitCount(), WholeHistory()
    for _ in range(120):
        limit = random.choice(limits)  # type: ignore[attr-defined]
        num_tokens = limit - (random.randrange(one_in) > 0)  # type: ignore[attr-defined]
        end_one(count, limit, num_tokens)
        twin.observe(limit, num_tokens)
        assert count.binds is twin.binds
