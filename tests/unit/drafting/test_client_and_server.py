# SPDX-License-Identifier: Apache-2.0
"""Real sockets on loopback. Every wait has a deadline; nothing sleeps."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import zmq

from draft_servers import ANY_PORT, CLIENT_KEYS, DEADLINE_S, SERVER_KEYS, serving
from seer.drafting.client import ClientConfig, DraftClient, shard_of
from seer.drafting.curve_keys import ClientKeys
from seer.drafting.ids import number_of
from seer.drafting.index import DraftIndex
from seer.drafting.link import Link
from seer.drafting.pace import SLOWEST_S, Pace
from seer.drafting.server import DraftServer, ServerConfig
from seer.drafting.wire import Ask, Fetch, Fetched, Push, Pushed, Refused, Status, decode, encode
from seer.errors import DraftError
from tcp_relay import TcpRelay


@contextlib.contextmanager
def a_client(*servers: str, **settings: object) -> Iterator[DraftClient]:
    client = DraftClient(ClientConfig(servers=servers, **{"keys": CLIENT_KEYS} | settings))  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.close(timeout_s=0.2)


def ask(address: str, frame: bytes, keys: ClientKeys | None = CLIENT_KEYS) -> object:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.secure(socket)
        socket.connect(address)
        socket.send(frame)
        assert socket.poll(int(DEADLINE_S * 1000)), "no answer"
        return decode(socket.recv())


def test_without_a_server_a_client_drafts_from_its_own_history() -> None:
    with a_client() as client:
        client.observe("g", "a", [1, 2, 3, 4, 5])
        client.observe("g", "b", [1, 2])
        drafts = client.draft([("g", "b"), ("g", "new")], [2, 3])
        assert drafts.draft(0).tokens.tolist() == [3, 4]
        assert drafts.draft(1).tokens.tolist() == [1, 2, 3]
        assert client.flush(DEADLINE_S)


def test_siblings_on_two_instances_draft_for_each_other(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as address, a_client(address) as one, a_client(address) as two:
        one.observe("g", "a", [1, 2, 3, 4, 5])
        assert one.flush(DEADLINE_S)
        two.register("g", ttl_s=60.0)
        assert two.flush(DEADLINE_S)
        two.observe("g", "b", [2, 3])
        assert two.draft([("g", "b")], [4]).draft(0).tokens.tolist() == [4, 5]
    assert not caplog.records, "connecting is not an outage"


@dataclass
class Exchanges:
    """A link whose group grows by a token at every look, and the messages that it has sent."""

    link: Link
    index: DraftIndex
    pace: Pace = field(default_factory=Pace)
    num_pushes: int = 0
    num_tokens: int = 0

    def look(self, now_s: float) -> int:
        """Look once and wait for the answers; returns the fetches."""
        group, before = 7, self.link.replica.fetched_rounds
        self.num_tokens = self.index.append_one(group, 1, [5], previous_count=self.num_tokens)
        self.link.replica.note(group, 1, self.num_tokens, 3600.0, now_s)
        self.link.step(now_s)
        self.num_pushes += self.link.replica.pushing
        while self.link.replica.fetching or self.link.replica.pushing:
            Link.wait([self.link], DEADLINE_S)
            self.link.step(now_s)
        return self.link.replica.fetched_rounds - before


@contextlib.contextmanager
def exchanging() -> Iterator[Exchanges]:
    with serving() as address:
        index, pace = DraftIndex(), Pace()
        link = Link(address, index, ClientConfig(servers=(address,), keys=CLIENT_KEYS), pace)
        try:
            link.replica.register(7, 3600.0, 0.0)
            give_up_s = time.monotonic() + DEADLINE_S
            while not link.replica.fetching:  # until it is connected
                link.step(0.0)
                assert time.monotonic() < give_up_s
            yield Exchanges(link, index, pace)
        finally:
            link.close()


def test_an_instance_that_does_not_draft_sends_few_messages_and_at_once_when_it_does() -> None:
    with exchanging() as one:
        looks_s = [0.03 * number for number in range(1, 301)]  # fewer tokens per message than are shipped at once
        num_fetches = 0
        for now_s in looks_s:
            one.pace.drafted(now_s)
            num_fetches += one.look(now_s)
        often = num_fetches, one.num_pushes
        one.num_pushes = num_fetches = 0
        for now_s in looks_s:
            num_fetches += one.look(9.0 + now_s)
        assert num_fetches < often[0] / 5
        assert one.num_pushes < often[1] / 3
        assert one.look(18.03) == 0
        one.pace.drafted(18.06)
        assert one.look(18.06) == 1


def test_a_client_that_does_not_draft_looks_seldom_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: deque[float] = deque(maxlen=1000)
    wait = Link.wait

    def noted(links: Sequence[Link], timeout_s: float) -> None:
        waits_s.append(timeout_s)
        wait(links, timeout_s)

    monkeypatch.setattr(Link, "wait", staticmethod(noted))
    monkeypatch.setattr("seer.drafting.pace.UNUSED_SHARE", 1e6)
    with serving() as address, a_client(address) as client:
        client.draft([("g", "a")], [1])
        give_up_s = time.monotonic() + DEADLINE_S
        while SLOWEST_S not in waits_s:
            assert time.monotonic() < give_up_s
            client.flush(DEADLINE_S)


def test_a_node_that_is_cut_off_drafts_from_what_it_has() -> None:
    """Its own tokens, new ones too, and those of siblings elsewhere that had come."""
    with serving() as address, a_client(address) as one:
        relay = TcpRelay("127.0.0.1", int(address.rpartition(":")[2]))
        with a_client(f"tcp://127.0.0.1:{relay.port}") as far:
            one.observe("g", "a", [1, 2, 3, 4, 5])
            assert one.flush(DEADLINE_S)
            far.register("g", ttl_s=60.0)
            assert far.flush(DEADLINE_S)
            relay.close()
            one.observe("g", "a", [6, 7])
            assert one.flush(DEADLINE_S)
            far.observe("g", "b", [8, 9, 2, 3])
            assert far.draft([("g", "b")], [4]).draft(0).tokens.tolist() == [4, 5]
            far.observe("g", "c", [8])
            assert far.draft([("g", "c")], [2]).draft(0).tokens.tolist() == [9, 2]
            assert one.draft([("g", "a")], [2]).counts.tolist() == [0], "nothing of the other side came"


def test_groups_are_spread_over_servers_and_found_again() -> None:
    with serving() as first, serving() as second:
        with a_client(first, second) as one, a_client(first, second) as two:
            for group in range(16):
                one.observe(group, "a", [group, group + 1, group + 2])
                two.register(group, ttl_s=60.0)
            assert one.flush(DEADLINE_S)
            assert two.flush(DEADLINE_S)
            for group in range(16):
                assert two.index.tokens(group, number_of("a")).tolist() == [group, group + 1, group + 2]
        shares = [ask(address, encode(Ask(1))) for address in (first, second)]
        assert [status.groups for status in shares if isinstance(status, Status)] == [
            sum(shard_of(group, 2) == shard for group in range(16)) for shard in (0, 1)
        ]


def test_a_request_that_moves_continues_its_stream() -> None:
    with serving() as address, a_client(address) as one, a_client(address) as two:
        one.observe("g", "a", [1, 2, 3])
        assert one.flush(DEADLINE_S)
        two.observe("g", "a", [1, 2, 3, 4], previous_count=0)
        two.observe("g", "a", [5, 6])
        assert two.flush(DEADLINE_S)
        assert one.flush(DEADLINE_S)
        assert one.index.tokens(number_of("g"), number_of("a")).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_response_generated_anew_gets_a_stream_of_its_own() -> None:
    with a_client() as client:
        client.observe("g", "a", [1, 2, 3, 4, 5])
        client.observe("g", "a", [7, 8], previous_count=2)  # rolled back to two tokens, then sampled differently
        client.observe("g", "a", [1, 2])
        assert client.draft([("g", "a")], [2]).draft(0).tokens.tolist() == [3, 4]
        assert len(client.index.requests(number_of("g"))) == 2


def test_weights_versions_do_not_see_each_other() -> None:
    with serving() as address, a_client(address, weights_version=1) as old, a_client(address, weights_version=2) as new:
        old.observe("g", "a", [1, 2, 3])
        assert old.flush(DEADLINE_S)
        new.register("g", ttl_s=60.0)
        assert new.flush(DEADLINE_S)
        assert new.index.requests(number_of("g")) == []


def test_a_server_that_restarts_gets_its_logs_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="seer.drafting.link")
    with contextlib.ExitStack() as stack:
        with serving() as address:
            one = stack.enter_context(a_client(address, answer_within_s=0.2))
            two = stack.enter_context(a_client(address, answer_within_s=0.2))
            two.register("g", ttl_s=60.0)
            one.observe("g", "a", [1, 2, 3])
            assert one.flush(DEADLINE_S)
            assert two.flush(DEADLINE_S)
        one.observe("g", "a", [4, 5])
        assert not one.flush(0.5), "no server is there to answer"
        assert one.draft([("g", "new")], [3]).draft(0).tokens.tolist() == [1, 2, 3]
        with serving(address):
            assert one.flush(DEADLINE_S)
            assert two.flush(DEADLINE_S)
            assert two.index.tokens(number_of("g"), number_of("a")).tolist() == [1, 2, 3, 4, 5]
            status = ask(address, encode(Ask(1)))
            assert isinstance(status, Status)
            assert status.tokens == 5
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert 1 <= len(warnings) <= 4, "an outage is logged once per client when it begins"


def test_no_server_at_the_address_is_said_once_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as address:
        pass
    with a_client(address, answer_within_s=0.05) as client:
        client.observe("g", "a", [1, 2, 3])
        assert not client.flush(1.0)
        assert client.draft([("g", "b")], [2]).draft(0).tokens.tolist() == [1, 2]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_a_server_that_never_answers_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.setsockopt(zmq.LINGER, 0)
        mute.bind(ANY_PORT)
        address = mute.getsockopt_string(zmq.LAST_ENDPOINT)
        with a_client(address, keys=None, answer_within_s=0.05) as client:
            client.observe("g", "a", [1, 2, 3])
            for _ in range(3):
                assert not client.flush(0.2)
            assert client.draft([("g", "b")], [2]).draft(0).tokens.tolist() == [1, 2]
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


@contextlib.contextmanager
def linked() -> Iterator[tuple[Link, "zmq.Socket[bytes]"]]:
    """A link whose group has a new token, and the socket of a server that answers what the test tells it to."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        server.bind(ANY_PORT)
        address, index = server.getsockopt_string(zmq.LAST_ENDPOINT), DraftIndex()
        config = ClientConfig(servers=(address,), ship_after_s=0.0, fetch_every_s=0.0, answer_within_s=2.0)
        link = Link(address, index, config, Pace())
        grow(link, 0.0)
        try:
            give_up_s = time.monotonic() + DEADLINE_S
            while not (link.replica.pushing and link.replica.fetching):  # until it is connected
                link.step(0.0)
                assert time.monotonic() < give_up_s
            yield link, server
        finally:
            link.close()


def grow(link: Link, now_s: float) -> None:
    """The group's response has one more token."""
    index = link.replica._index
    link.replica.note(7, 1, index.append_one(7, 1, [5], previous_count=index.length(7, 1)), 3600.0, now_s)


def next_question(server: "zmq.Socket[bytes]") -> tuple[bytes, Push | Fetch]:
    while True:
        assert server.poll(int(DEADLINE_S * 1000)), "no question"
        peer, frame = server.recv_multipart()
        message = decode(frame)
        if isinstance(message, Push | Fetch):
            return peer, message


def answer_to(message: Push | Fetch) -> bytes:
    if isinstance(message, Push):
        return encode(Pushed(message.sequence, 1, [tail.start + len(tail.tokens) // 4 for tail in message.tails]))
    return encode(Fetched(message.sequence, 1, [0] * len(message.known), [], [], False))


def test_a_server_that_answers_each_question_in_time_is_never_gone(caplog: pytest.LogCaptureFixture) -> None:
    """A push and a fetch take turns: at no moment is there none that waits."""
    with linked() as (link, server):
        waiting = [next_question(server), next_question(server)]
        for second in range(1, 10):
            peer, message = waiting.pop(0)
            grow(link, second)
            server.send_multipart([peer, answer_to(message)])
            Link.wait([link], DEADLINE_S)
            link.step(second)  # the answer to a question of two seconds ago, and the next question of its kind
            waiting.append(next_question(server))
            assert type(waiting[-1][1]) is type(message)
    assert not caplog.records


@pytest.mark.parametrize("silent", [Push, Fetch])
def test_a_server_that_leaves_one_kind_of_question_unanswered_is_gone(
    silent: type, caplog: pytest.LogCaptureFixture
) -> None:
    with linked() as (link, server):
        waiting = dict(zip((Push, Fetch), (next_question(server), next_question(server)), strict=True))
        answered = Fetch if silent is Push else Push
        for second in range(1, 4):
            peer, message = waiting[answered]
            grow(link, second)
            server.send_multipart([peer, answer_to(message)])
            Link.wait([link], DEADLINE_S)
            assert not caplog.records
            link.step(second)
            if second < 3:
                waiting[answered] = next_question(server)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_client_whose_thread_has_failed_drafts_on_and_keeps_nothing_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Link, now: float) -> None:
        raise MemoryError

    monkeypatch.setattr(Link, "step", fail)
    with a_client("tcp://127.0.0.1:1") as client:
        assert client._thread is not None
        client._thread.join(DEADLINE_S)
        client.register("g", 60.0)
        client.observe("g", "a", [1, 2, 3, 4])
        client.observe("h", "b", [1])
        client.drop("h")
        assert client.draft([("g", "new")], [2]).draft(0).tokens.tolist() == [1, 2]
        assert not client.flush(DEADLINE_S)
        assert not client._jobs
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_bad_frame_is_refused_and_the_server_goes_on() -> None:
    with serving() as address:
        assert isinstance(ask(address, b"hello"), Refused)
        assert isinstance(ask(address, encode(Refused(1, 1, "a reply is no request"))), Refused)
        assert isinstance(ask(address, encode(Ask(1))), Status)


def test_an_address_in_use_is_an_error_with_a_hint() -> None:
    with serving() as address, pytest.raises(DraftError) as problem:
        DraftServer(ServerConfig(address=address, keys=SERVER_KEYS))
    assert problem.value.hint


def test_a_dropped_group_is_gone_here_and_there() -> None:
    with serving() as address, a_client(address) as client:
        client.observe("g", "a", [1, 2, 3])
        assert client.flush(DEADLINE_S)
        client.drop("g")
        assert client.flush(DEADLINE_S)
        assert client.index.stats().groups == 0
        status = ask(address, encode(Ask(1)))
        assert isinstance(status, Status)
        assert status.tokens == 0
