# SPDX-License-Identifier: Apache-2.0
import pytest

from seer.drafting.log import GROUP_BYTES, MAX_VERSION_STEP, STREAM_BYTES, LogLimits, LogStore
from seer.drafting.wire import CONFLICT, FULL, STALE, Known, Tail


def tokens(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def known(group: int, version: int = 0, **lengths: int) -> Known:
    """known(1, r7=3): three tokens of request 7 are held."""
    numbers = {int(name[1:]): length for name, length in lengths.items()}
    return Known(
        group,
        version,
        b"".join(number.to_bytes(8, "little") for number in numbers),
        b"".join(length.to_bytes(4, "little") for length in numbers.values()),
    )


def everything(store: LogStore, group: int, weights_version: int = 0) -> dict[int, bytes]:
    _, tails, _, _ = store.fetch(weights_version, [known(group)], 1 << 20, now=0.0)
    return {tail.request: tail.tokens for tail in tails}


def test_appending_twice_changes_nothing() -> None:
    store = LogStore()
    assert store.append(0, Tail(1, 7, 0, tokens(5, 6)), now=0.0) == 2
    assert store.append(0, Tail(1, 7, 0, tokens(5, 6)), now=0.0) == 2
    assert store.append(0, Tail(1, 7, 1, tokens(6, 8)), now=0.0) == 3
    assert everything(store, 1) == {7: tokens(5, 6, 8)}


def test_a_gap_is_refused_with_the_length_held() -> None:
    store = LogStore()
    store.append(0, Tail(1, 7, 0, tokens(5, 6)), now=0.0)
    assert store.append(0, Tail(1, 7, 3, tokens(9)), now=0.0) == 2
    assert everything(store, 1) == {7: tokens(5, 6)}


def test_other_tokens_at_a_known_position_are_a_conflict() -> None:
    store = LogStore()
    store.append(0, Tail(1, 7, 0, tokens(5, 6)), now=0.0)
    assert store.append(0, Tail(1, 7, 1, tokens(9, 9)), now=0.0) == CONFLICT
    assert everything(store, 1) == {7: tokens(5, 6)}


def test_fetch_returns_only_what_is_missing_and_says_what_the_server_lacks() -> None:
    store = LogStore()
    store.append(0, Tail(1, 7, 0, tokens(5, 6, 7)), now=0.0)
    store.append(0, Tail(1, 8, 0, tokens(1)), now=0.0)
    versions, tails, wanted, more = store.fetch(0, [known(1, r7=2, r8=4, r9=1)], 1 << 20, now=0.0)
    assert tails == [Tail(1, 7, 2, tokens(7))]
    assert [(want.request, want.start) for want in wanted] == [(8, 1), (9, 0)]
    assert not more
    assert store.fetch(0, [known(1, version=versions[0])], 1 << 20, now=0.0) == (versions, [], [], False)


def test_a_long_answer_comes_in_pieces_that_add_up() -> None:
    store = LogStore()
    for request in range(5):
        store.append(0, Tail(1, request, 0, tokens(*range(10))), now=0.0)
    have = dict.fromkeys(range(5), 0)
    for _ in range(20):
        state = known(1, **{f"r{request}": length for request, length in have.items()})
        _, tails, _, more = store.fetch(0, [state], 28, now=0.0)
        assert sum(len(tail.tokens) for tail in tails) <= 28
        for tail in tails:
            assert tail.start == have[tail.request]
            have[tail.request] += len(tail.tokens) // 4
        if not more:
            break
    assert set(have.values()) == {10}


def test_a_group_unused_for_its_time_to_live_is_gone() -> None:
    store = LogStore()
    store.register(0, [1, 2], ttl_s=10.0, now=0.0)
    store.append(0, Tail(1, 7, 0, tokens(5)), now=0.0)
    store.fetch(0, [known(2)], 100, now=8.0)
    assert store.expire(now=11.0) == 1
    assert store.stats().groups == 1
    assert everything(store, 1) == {}


def test_weights_versions_are_kept_apart() -> None:
    store = LogStore()
    store.append(3, Tail(1, 7, 0, tokens(5)), now=0.0)
    assert everything(store, 1, weights_version=4) == {}
    assert store.append(3, Tail(1, 7, 1, tokens(6)), now=0.0) == STALE
    assert everything(store, 1, weights_version=3) == {}
    assert store.stats().bytes == GROUP_BYTES, "the one of version 4"


def test_memory_is_bounded_and_the_oldest_groups_go_first() -> None:
    limit = 5 * (GROUP_BYTES + STREAM_BYTES + 400)
    store = LogStore(LogLimits(memory_bytes=limit))
    for group in range(1, 8):
        assert store.append(0, Tail(group, 1, 0, tokens(*range(100))), now=float(group)) == 100
        assert store.stats().bytes <= limit
    assert [bool(everything(store, group)) for group in (1, 4)] == [False, True]
    assert store.append(0, Tail(9, 1, 0, tokens(*range(5000))), now=9.0) == FULL


def test_the_books_balance() -> None:
    store = LogStore(LogLimits(memory_bytes=50_000))
    for step in range(200):
        weights_version = step // 50
        store.append(weights_version, Tail(step % 7, step % 3, 0, tokens(*range(step % 11))), now=float(step))
        if step % 13 == 0:
            store.drop(weights_version, [step % 5])
        stats = store.stats()
        assert stats.bytes == GROUP_BYTES * stats.groups + 4 * stats.tokens + STREAM_BYTES * stats.streams


@pytest.mark.parametrize("how", ["registered", "fetched", "pushed to"])
def test_groups_without_tokens_are_bounded_too(how: str) -> None:
    limit = 100 * GROUP_BYTES
    store = LogStore(LogLimits(memory_bytes=limit))
    for group in range(10_000):
        if how == "registered":
            store.register(0, [group], ttl_s=60.0, now=0.0)
        elif how == "fetched":
            store.fetch(0, [known(group)], 1 << 20, now=0.0)
        else:
            store.append(0, Tail(group, 1, 5, tokens(1)), now=0.0)
        assert store.stats().bytes <= limit
    assert store.stats().groups == 100


def test_a_far_weights_version_does_not_make_the_present_one_stale() -> None:
    store = LogStore()
    store.append(3, Tail(1, 7, 0, tokens(5)), now=0.0)
    store.drop(2**60, [1])
    store.drop(4, [])
    store.register(2**60, [1], ttl_s=60.0, now=0.0)
    assert store.append(3 + MAX_VERSION_STEP + 1, Tail(1, 7, 0, tokens(5)), now=0.0) == STALE
    assert store.append(3, Tail(1, 7, 1, tokens(6)), now=0.0) == 2
    assert everything(store, 1, weights_version=3) == {7: tokens(5, 6)}
    store.expire(now=1e9)
    assert store.append(2**40, Tail(1, 7, 0, tokens(5)), now=0.0) == 1, "an empty server follows any client"
