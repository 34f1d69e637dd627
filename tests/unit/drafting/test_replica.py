# SPDX-License-Identifier: Apache-2.0
"""What a replica makes of answers, one at a time."""

import numpy as np

from seer.drafting.index import DraftIndex
from seer.drafting.replica import SHIP_TOKENS, Replica
from seer.drafting.wire import CONFLICT, Fetched, Pushed, Tail, Wanted, pack_tokens

TTL_S = 60.0


def a_replica(*tokens: int) -> tuple[DraftIndex, Replica]:
    """A replica that has generated these tokens of request 7 in group 1."""
    index = DraftIndex()
    replica = Replica(index, weights_version=0)
    index.append_one(1, 7, list(tokens))
    replica.note(1, 7, len(tokens), TTL_S, now=0.0)
    return index, replica


def pushed_tokens(replica: Replica) -> list[tuple[int, int]]:
    push = replica.next_push()
    return [] if push is None else [(tail.start, len(tail.tokens) // 4) for tail in push.tails]


def test_a_gap_is_filled_from_the_length_the_server_holds() -> None:
    _, replica = a_replica(1, 2, 3, 4)
    push = replica.next_push()
    assert push is not None
    replica.receive(Pushed(push.sequence, 1, [1]), now=0.0)
    assert pushed_tokens(replica) == [(1, 3)]


def test_a_late_answer_is_ignored() -> None:
    _, replica = a_replica(1, 2, 3)
    first = replica.next_push()
    assert first is not None
    replica.lose()
    replica.note(1, 7, 3, TTL_S, now=0.0)
    fetch = replica.next_fetch()
    assert fetch is not None
    replica.receive(Fetched(fetch.sequence, 1, [5], [], [Wanted(1, 7, 0)], False), now=0.0)
    assert pushed_tokens(replica) == [(0, 3)]
    replica.receive(Pushed(first.sequence, 1, [CONFLICT]), now=0.0)
    assert replica.pushing
    assert replica.refused_streams == 0


def test_a_conflict_ends_the_shipping_of_a_stream() -> None:
    index, replica = a_replica(1, 2, 3)
    push = replica.next_push()
    assert push is not None
    replica.receive(Pushed(push.sequence, 1, [CONFLICT]), now=0.0)
    index.append_one(1, 7, [4])
    replica.note(1, 7, 4, TTL_S, now=0.0)
    assert replica.due_at(0.1) is None
    assert replica.refused_streams == 1


def test_tokens_leave_after_64_of_them_or_in_time() -> None:
    index, replica = a_replica(1)
    assert replica.due_at(0.1) == 0.1
    index.append_one(1, 7, list(range(SHIP_TOKENS)))
    replica.note(1, 7, SHIP_TOKENS + 1, TTL_S, now=0.05)
    assert replica.due_at(0.1) == 0.0


def test_answers_for_a_dropped_group_do_not_bring_it_back() -> None:
    index, replica = a_replica(1, 2)
    fetch = replica.next_fetch()
    assert fetch is not None
    replica.drop(1)
    index.drop([1])
    tail = Tail(1, 8, 0, pack_tokens(np.array([5], np.int32)))
    replica.receive(Fetched(fetch.sequence, 1, [5], [tail], [Wanted(1, 7, 0)], False), now=0.0)
    assert index.stats().groups == 0
    assert replica.settled


def test_a_group_unused_for_its_time_to_live_is_no_longer_followed() -> None:
    _, replica = a_replica(1)
    assert replica.expire(now=TTL_S - 1) == []
    assert replica.expire(now=TTL_S + 1) == [1]
    assert replica.next_fetch() is None


def test_a_new_server_is_told_everything_even_if_its_versions_look_familiar() -> None:
    _, replica = a_replica(1, 2, 3)
    assert pushed_tokens(replica) == [(0, 3)]
    for server in (1, 2):  # the second has forgotten the tokens, and its group happens to be at version 5 too
        fetch = replica.next_fetch()
        assert fetch is not None
        replica.receive(Fetched(fetch.sequence, server, [5], [], [], False), now=0.0)
    fetch = replica.next_fetch()
    assert fetch is not None
    assert fetch.known[0].version == 0
    assert [notice.groups for notice in replica.next_notices()] == [[1]]
