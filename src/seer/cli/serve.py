# SPDX-License-Identifier: Apache-2.0
"""`seer serve`: rollouts over HTTP until SIGTERM or SIGINT, which let the requests in flight end.

Order of work: check the options and the model, take the port, start the instances, print the ready line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seer.cli.number_option import NumberOption
from seer.cli.rollout_options import add_config_options, add_key, add_rollout_options
from seer.cli.run_config import read_run
from seer.cli.signals import exit_code, signals_cancel
from seer.cli.size_option import size_option
from seer.cli.url_option import url_option
from seer.config import RolloutConfig
from seer.errors import ConfigError, MissingExtra
from seer.metrics.events import EventSink, both
from seer.ranges import Count, Port, Seconds

if TYPE_CHECKING:
    from seer.api import Rollout
    from seer.serve.settings import ServeSettings

EXAMPLES = """\
examples:
  seer serve --model smollm2 --instances 2                    http://127.0.0.1:8000, this machine only
  seer serve --preset one-gpu --model DIR --port 9000
  seer serve --model DIR --weights-dir checkpoints            new weights: POST /update_weights {"path": "step-10"}
  seer serve --model DIR --host 0.0.0.0 --api-key-file key --admin-key-file admin-key

  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
       -d '{"prompt": "Once upon", "n": 4, "seed": 7, "max_tokens": 32}'

endpoints:
  OpenAI       /v1/completions, /v1/chat/completions, /v1/models
  vLLM         /inference/v1/generate, /tokenize, /detokenize, /health
  SGLang       /generate, /workers
  to look at   / in a browser, /metrics for Prometheus
  admin        /pause, /resume, /sleep, /wake_up, /update_weights and the other weight endpoints

exit codes:
  1    the server failed: no instance is left, for example
  2    wrong arguments or files; nothing was started
  143  ended by SIGTERM, 130 by Ctrl-C, after the requests in flight had ended (again: at once)
"""


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "serve",
        help="serve rollouts over HTTP to RL frameworks and OpenAI's clients",
        description="Serve a model on N instances over HTTP. Requests of all clients, whenever they come, are\n"
        "scheduled, divided and drafted together. Needs the extra `serve`.",
        epilog=EXAMPLES,
    )
    add_config_options(parser)
    add_rollout_options(parser)
    add_key(parser, "--scheduler", "rollout.scheduler", metavar="NAME", help="scheduler of the requests")
    add_key(parser, "--seed", "seed", type=int, metavar="S", help="gives requests without a seed theirs")
    _add_server_options(parser)
    parser.set_defaults(run=run)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; any but loopback needs a key (%(default)s)",
    )
    add("--port", type=NumberOption(Port), default=8000, metavar="N", help="port; 0: any free one (%(default)s)")
    add("--served-model-name", metavar="NAME", help="how clients name the model (as --model has it)")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key of the clients (or SEER_API_KEY)")
    admin = "file with the key of the administrative endpoints (or SEER_ADMIN_KEY)"
    add("--admin-key-file", type=Path, metavar="FILE", help=admin)
    add("--api-key", type=_refused_key, help=argparse.SUPPRESS)
    add("--admin-key", type=_refused_key, help=argparse.SUPPRESS)
    add("--weights-dir", type=Path, metavar="DIR", help="folder that new weights may be read from (none)")
    body = "largest body of a request (64MiB)"
    add("--max-body", type=size_option, default=64 << 20, metavar="SIZE", help=body)
    flight = "most responses that wait or run; more are answered with 429 (%(default)s)"
    add("--max-in-flight", type=NumberOption(Count), default=4096, metavar="N", help=flight)
    connections = "most connections open at once; more are answered with 503 (%(default)s)"
    add("--max-connections", type=NumberOption(Count), default=8192, metavar="N", help=connections)
    drain = "seconds that running requests have to end after SIGTERM (%(default)g)"
    add("--drain-s", type=NumberOption(Seconds), default=300.0, metavar="S", help=drain)
    slow = "seconds after which a stream that is not read is cut (%(default)g)"
    add("--slow-reader-s", type=NumberOption(Seconds), default=60.0, metavar="S", help=slow)
    spans = "send OpenTelemetry spans of requests and chunks to this OTLP endpoint, as http://127.0.0.1:4318 (none)"
    add("--otlp-endpoint", type=url_option, metavar="URL", help=spans)
    add("--json", action="store_true", help="print the ready line and log lines as JSON")


def _refused_key(key: str) -> str:
    """For options that other servers have; the message does not repeat the key."""
    raise argparse.ArgumentTypeError("other users of a machine can read command lines: give the key in a file")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal asks to stop."""
    for package in ("fastapi", "uvicorn", "httptools"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "serve")
    config = read_run(args)
    if args.dry_run:
        from seer.cli.dry_run import print_dry_run

        print_dry_run(config, as_json=args.json)
        return 0
    from seer.api import Rollout
    from seer.serve.uvicorn_server import bind, run_on_fast_loop

    _log_to_stderr(as_json=args.json)
    settings = _settings(args, config.rollout)
    rollout = Rollout(config.rollout)
    with contextlib.closing(bind(settings)) as listener:
        number = run_on_fast_loop(_serve(rollout, settings, listener, seed=config.seed, args=args))
    return exit_code(number)


def _settings(args: argparse.Namespace, config: RolloutConfig) -> ServeSettings:
    from seer.serve.keys import Keys
    from seer.serve.settings import Limits, ServeSettings

    if args.weights_dir is not None and not args.weights_dir.is_dir():
        raise ConfigError(f"--weights-dir {args.weights_dir} is no folder")
    return ServeSettings(
        host=args.host,
        port=args.port,
        keys=Keys(
            api=_key(args.api_key_file, "SEER_API_KEY"),
            admin=_key(args.admin_key_file, "SEER_ADMIN_KEY"),
        ),
        limits=Limits(
            max_body_bytes=args.max_body,
            max_in_flight=args.max_in_flight,
            max_connections=args.max_connections,
            drain_s=args.drain_s,
            slow_reader_s=args.slow_reader_s,
        ),
        model_name=args.served_model_name or config.model,
        weight_backend="gloo" if config.on_cpu else "nccl",
        weights_dir=args.weights_dir,
    )


def _key(path: Path | None, variable: str) -> str | None:
    """From a file, or from the environment, where it does not stay: instances are processes and would inherit it."""
    from seer.serve.keys import read_key

    given = os.environ.pop(variable, "").strip() or None
    return read_key(path) if path is not None else given


async def _serve(
    rollout: Rollout, settings: ServeSettings, listener: Any, *, seed: int, args: argparse.Namespace
) -> int:
    """Serve, and return the signal that asked to stop."""
    from seer.metrics.live_counts import LiveCounts
    from seer.runs.fleet_sample import fleet_sample
    from seer.serve.app import make_service
    from seer.serve.backend import Backend
    from seer.serve.live import LivePage
    from seer.serve.server import serve

    # `serve` has signal handlers of its own.
    with contextlib.ExitStack() as stack, signals_cancel(rollout, keeps_run=False) as interruption:
        try:
            name = settings.model_name or rollout.config.model
            live = LivePage(LiveCounts(), lambda: fleet_sample(rollout.fleet), f"seer serve: {name}")
            events = stack.enter_context(_sink(live.on_event, args.otlp_endpoint))
            async with rollout, rollout.session(seed=seed, events=events) as session:
                backend = Backend(
                    name=name,
                    session=session,
                    instances=rollout.fleet.instances,
                    codec=rollout.engine.codec,
                    live=live,
                    sample=lambda: fleet_sample(rollout.fleet),
                )
                service = make_service(backend, settings)
                return await serve(service, listener, on_ready=lambda url: _print_ready(url, name, args.json))
        except asyncio.CancelledError:
            if not interruption.swallow():
                raise
    assert interruption.number is not None, "a signal ended the start"
    return interruption.number


@contextlib.contextmanager
def _sink(live: EventSink, endpoint: str | None) -> Iterator[EventSink]:
    """Where the session's events go; spans that wait are sent at the end."""
    if endpoint is None:
        yield live
        return
    from seer.metrics.spans import Spans, open_telemetry

    provider = open_telemetry(endpoint)
    try:
        yield both(live, Spans(provider, asyncio.get_running_loop().time))
    finally:
        provider.shutdown()


def _print_ready(url: str, model: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": url, "model": model}), flush=True)
    else:
        print(f"seer serves {model} at {url}", flush=True)


def _log_to_stderr(*, as_json: bool) -> None:
    """Warnings of the server and the fleet; as JSON, one object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else logging.Formatter("%(levelname)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.WARNING)


class _JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """With the traceback, where there is one."""
        value = {"time_s": record.created, "level": record.levelname, "logger": record.name}
        value["message"] = record.getMessage()
        if record.exc_info:
            value["traceback"] = self.formatException(record.exc_info)
        return json.dumps(value)
