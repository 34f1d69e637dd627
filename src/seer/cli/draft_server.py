"""`seer draft-server`: keep the token logs that let siblings on different instances draft for each other.

Prints one line once it listens, serves until SIGTERM or SIGINT, then answers what has arrived and leaves
with code 0.
"""

import argparse
import json
import os
import signal
from pathlib import Path

from seer.drafting.log import LogLimits
from seer.drafting.server import DEFAULT_ADDRESS, DraftServer, ServerConfig
from seer.errors import ConfigError

SECRET_VARIABLE = "SEER_DRAFT_SECRET"


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb `draft-server`."""
    parser = subparsers.add_parser("draft-server", help="serve token logs to draft clients")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="where to listen (%(default)s)")
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"file with the shared secret (or set {SECRET_VARIABLE}); needed off loopback",
    )
    parser.add_argument("--open", action="store_true", help="listen off loopback without a secret")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="limit of the logs (%(default)s)")
    parser.add_argument("--ttl-s", type=float, default=3600.0, help="life of an unused group (%(default)s)")
    parser.add_argument(
        "--retain",
        action="store_true",
        help="keep finished groups' logs for the next weights version of the same prompt",
    )
    parser.add_argument("--json", action="store_true", help="print the address as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal asks to stop."""
    if args.memory_gib <= 0 or args.ttl_s <= 0:
        raise ConfigError(f"--memory-gib {args.memory_gib:g} and --ttl-s {args.ttl_s:g} must be above 0")
    limits = LogLimits(memory_bytes=int(args.memory_gib * 2**30), default_ttl_s=args.ttl_s, retain=args.retain)
    server = DraftServer(
        ServerConfig(address=args.address, secret=_secret(args.secret_file), open_to_network=args.open, limits=limits)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if args.json:
        print(json.dumps({"address": server.address}), flush=True)
    else:
        print(f"draft server listens on {server.address}", flush=True)
    server.run()
    return 0


def _secret(file: Path | None) -> bytes | None:
    if file is None:
        value = os.environ.get(SECRET_VARIABLE)
        return value.encode() if value else None
    try:
        secret = file.read_bytes().strip()
    except OSError as problem:
        raise ConfigError(f"cannot read --secret-file {file}: {problem.strerror}") from None
    if not secret:
        raise ConfigError(f"--secret-file {file} is empty")
    return secret
