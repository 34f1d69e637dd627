# SPDX-License-Identifier: Apache-2.0
"""`seer top`: the state of a server, or of a rollout with `--watch`, in the terminal.

What the address sends need not come from Seer: it is read as types, up to a limit, and shown without control
characters.
"""

from __future__ import annotations

import argparse
import http
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from seer.cli.url_option import url_option
from seer.errors import SeerError
from seer.machine.json_files import UNREADABLE
from seer.ranges import INT64_MAX

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLES = """\
examples:
  seer top                                   a server on this machine
  seer top http://127.0.0.1:8001             a rollout that runs with --watch
  seer top --once --json | jq .instances     one look
"""
SILENCE_S = 30.0
"""States come twice a second; after this long without one the server is gone."""

_HINT = "is a `seer serve` there?"

MAX_LINE_BYTES = 16 << 20
"""Of one state: thousands of spans have a few hundred kilobytes."""

Number = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]


class InstanceNow(msgspec.Struct, frozen=True):
    """An instance of a state."""

    is_up: bool
    num_running: Number
    num_waiting: Number
    kv_usage: Amount
    tokens: Number


class State(msgspec.Struct, frozen=True):
    """What the server sends, as far as it is shown (`seer.serve.live`)."""

    title: str
    requests: dict[str, Number]
    ended: dict[str, Number]
    tokens: Number
    tokens_per_s: Amount
    left_s: Amount | None
    even_s: Amount | None
    migrations: Number
    lost_instances: Number
    weights_version: Number
    draft_tokens: Number
    accepted_tokens: Number
    instances: list[InstanceNow]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "top",
        help="watch a server or a rollout in the terminal",
        description="Show what the instances of a `seer serve`, or of a `seer rollout --watch`, are doing.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "url",
        nargs="?",
        type=url_option,
        default="http://127.0.0.1:8000",
        help="address of the server or rollout (%(default)s)",
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the key of the server's clients")
    parser.add_argument("--once", action="store_true", help="show one state, and exit")
    parser.add_argument("--json", action="store_true", help="print states as JSON, one a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show states until the server or the user ends it."""
    lines = read_lines(args.url, _key(args.api_key_file))
    if args.json or args.once:
        for line in lines:
            state = parse_state(line, args.url)
            if args.json:
                print(json.dumps(msgspec.json.decode(line)), flush=True)
            else:
                _print(state)
            if args.once:
                break
        return 0
    from rich.live import Live

    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as shown:
        for line in lines:
            shown.update(screen_of(parse_state(line, args.url)), refresh=True)
    return 0


def parse_state(line: bytes, url: str) -> State:
    """A state; refused if it is none."""
    try:
        return msgspec.json.decode(line, type=State)
    except UNREADABLE as error:
        raise SeerError(f"{url} sent no state of a fleet: {error}", hint=_HINT) from None


def read_lines(url: str, key: str | None = None) -> Iterator[bytes]:
    """States of a server as they come, as JSON; at least one."""
    num_states = 0
    request = urllib.request.Request(f"{url.rstrip('/')}/live/events")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_S) as response:
            while line := response.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise SeerError(f"{url} sent a line of more than {MAX_LINE_BYTES:,} bytes, the limit")
                if line.startswith(b"data: "):
                    num_states += 1
                    yield line.removeprefix(b"data: ")
    except urllib.error.HTTPError as error:
        needs_key = error.code == http.HTTPStatus.UNAUTHORIZED
        hint = "--api-key-file FILE with the key of the server's clients" if needs_key else _HINT
        raise SeerError(f"{url} cannot be watched: {error}", hint=hint) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: not a URL
        raise SeerError(f"{url} cannot be watched: {error}", hint=_HINT) from None
    if not num_states:
        raise SeerError(f"{url} sent no state of a fleet", hint=_HINT)


def screen_of(state: State) -> RenderableType:
    """A state as a table."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table("instance", "state", "running", "waiting inside", "KV in use", "tokens", expand=True)
    for number, one in enumerate(state.instances):
        up = Text("up", "green") if one.is_up else Text("down", "bold red")
        kv = f"{100 * one.kv_usage:.0f}%"
        table.add_row(str(number), up, f"{one.num_running:,}", f"{one.num_waiting:,}", kv, f"{one.tokens:,}")
    title = "".join(letter if letter.isprintable() else "?" for letter in state.title)
    return Group(Text(title, "bold"), *map(Text, lines_of(state)), table)


def lines_of(state: State) -> list[str]:
    """The numbers above the table."""
    requests, ended = state.requests, state.ended
    left = "unknown" if state.left_s is None else f"{state.left_s:.0f} s"
    even = "unknown" if state.even_s is None else f"{state.even_s:.0f} s"
    drafted, accepted = state.draft_tokens, state.accepted_tokens
    drafts = f"{100 * accepted / drafted:.0f}% of {drafted:,} draft tokens accepted" if drafted else "no drafts"
    return [
        f"{requests.get('running', 0):,} running, {requests.get('queued', 0):,} queued, "
        f"{requests.get('parked', 0):,} parked, {requests.get('at_tool', 0):,} at a tool; "
        f"{sum(ended.values()):,} ended, {ended.get('failed', 0):,} failed",
        f"{state.tokens:,} tokens, {state.tokens_per_s:,.0f} tokens/s; time left {left}, if spread evenly {even}",
        f"{drafts}; {state.migrations:,} migrations; {state.lost_instances:,} instances lost; "
        f"weights version {state.weights_version}",
    ]


def _print(state: State) -> None:
    from rich.console import Console

    Console().print(screen_of(state))


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    from seer.serve.keys import read_key

    return read_key(path)
