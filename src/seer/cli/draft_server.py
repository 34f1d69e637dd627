# SPDX-License-Identifier: Apache-2.0
"""`seer draft-server`: keep the token logs that let siblings on different instances draft for each other.

Prints one line once it listens, serves until SIGTERM or SIGINT, then answers what has arrived and exits with code 0.
"""

import argparse
import json
import signal
from pathlib import Path

from seer.cli.number_option import NumberOption
from seer.cli.size_option import size_option
from seer.drafting.curve_keys import CLIENT_FILE, SERVER_FILE, read_server_keys, write_keys
from seer.drafting.log import LogLimits
from seer.drafting.server import DEFAULT_ADDRESS, DraftServer, ServerConfig, bound_memory
from seer.machine.memory import refuse_beyond_memory
from seer.ranges import NumBytes, Seconds, check

DEFAULT_BYTES = 8 << 30
EXAMPLES = """\
examples:
  seer draft-server --make-keys keys         write the key files of a server and its clients
  seer draft-server --keys keys --memory 32GiB
"""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb `draft-server`."""
    parser = subparsers.add_parser(
        "draft-server",
        help="serve the token logs of groups to draft clients",
        description="Keep the tokens that each group has generated, so that instances draft from each other's\n"
        "responses. `seer rollout` starts a draft server by itself.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="where to listen (%(default)s)")
    access = parser.add_mutually_exclusive_group()
    access.add_argument(
        "--keys", type=Path, metavar="DIR", help=f"folder with {SERVER_FILE}: only clients with {CLIENT_FILE} get in"
    )
    access.add_argument("--make-keys", type=Path, metavar="DIR", help="write fresh key files into DIR, and exit")
    access.add_argument("--open", action="store_true", help="serve without keys, to all who can reach the address")
    memory = "memory limit of the logs (8GiB)"
    parser.add_argument("--memory", type=size_option, default=DEFAULT_BYTES, metavar="SIZE", help=memory)
    parser.add_argument(
        "--ttl-s",
        metavar="S",
        type=NumberOption(Seconds),
        default=3600.0,
        help="seconds an unused group is kept (%(default)s)",
    )
    parser.add_argument(
        "--retain",
        action="store_true",
        help="keep the logs of finished groups for the next weights version",
    )
    parser.add_argument("--json", action="store_true", help="print the address as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal asks to stop."""
    if args.make_keys is not None:
        return _make_keys(args.make_keys, as_json=args.json)
    check(args.memory, NumBytes, "--memory")
    if args.memory != DEFAULT_BYTES:  # the default is a limit, and taken as it is used
        refuse_beyond_memory(args.memory, "memory for logs", "--memory")
    limits = LogLimits(memory_bytes=args.memory, default_ttl_s=args.ttl_s, retain=args.retain)
    keys = read_server_keys(args.keys) if args.keys is not None else None
    config = ServerConfig(address=args.address, keys=keys, open_to_all=args.open, limits=limits)
    bound_memory(limits)
    server = DraftServer(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if args.json:
        print(json.dumps({"address": server.address}), flush=True)
    else:
        print(f"draft server listens on {server.address}", flush=True)
    server.run()
    return 0


def _make_keys(folder: Path, *, as_json: bool) -> int:
    write_keys(folder)
    if as_json:
        print(json.dumps({"server": str(folder / SERVER_FILE), "client": str(folder / CLIENT_FILE)}))
    else:
        print(f"{folder / SERVER_FILE} is for the server, {folder / CLIENT_FILE} for its clients: keep both secret")
    return 0
