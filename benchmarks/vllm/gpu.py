# SPDX-License-Identifier: Apache-2.0
"""vLLM as a Seer instance on a GPU: correctness, migration, overhead, drafting, in one run that ends within its limit.

    python benchmarks/vllm/gpu.py --smollm2 FOLDER --qwen FOLDER --out DIR [--trace FILE.npz] [--limit-s 540]
    python benchmarks/vllm/gpu.py --device cpu --tiny --out DIR      the same on a CPU with a tiny model, to check this

Sections (`--only correctness,migration,...`)
  correctness  two instances, chunks of 32 moving between them, with drafts: tokens and log-probabilities against one
               uninterrupted run, and that run against itself in a batch (the difference that batching makes alone)
  migration    an 8k-token context of a 7B shape with made-up weights: loaded from the pool against computed again
  overhead     our instance with the pool, without drafts, against plain vLLM, by batch size
  drafting     groups of 16 on Qwen2.5-Coder-1.5B: grouped drafts (unpadded, and padded to full CUDA graphs)
               against plain vLLM and its own n-gram (and suffix) drafts, by batch size
  together     overhead and drafting on Qwen with engines that start once; not run by default

Every engine has its own process (served.py). The engines of a section start together and are measured in turns, while
the others idle. DIR/vllm-gpu.json is written after every number. A section that fails leaves its traceback there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent)]

from step_profile import SHAPES

from seer.engine.vllm.engine_arguments import engine_arguments
from seer.engine.vllm.model_folder import ModelFolder, read_folder
from seer.engine.vllm.settings import VllmSettings
from seer.engine.vllm.version import require_vllm
from stamp import QWEN_MIX, print_stamp
from turns import await_turn

LEAST_S = 20.0
"""With less time left than this, no section is started."""


class Bench:
    """The run: its options, its deadline, its results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.on_cpu = args.device == "cpu"
        self.deadline_s = time.monotonic() + args.limit_s
        self.path = args.out / "vllm-gpu.json"
        self.results: dict[str, Any] = {
            "stamp": print_stamp(args),
            "vllm": require_vllm(),
        }

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def wait_for_go(self) -> None:
        """Wait until another script has measured: engines may start at the same time."""
        (self.args.out / "engines.ready").touch()
        await_turn(self.args.go, self.left_s - LEAST_S)

    def note(self, section: str, name: str, value: Any) -> None:
        """Write a number at once, so that it survives if the run is stopped."""
        self.results.setdefault(section, {})[name] = value
        self.path.write_text(json.dumps(self.results, indent=1))
        print(f"{section}: {name}: {json.dumps(value)}", flush=True)

    def settings(self, folder: Path, **changes: Any) -> dict[str, Any]:
        """Settings of a Seer instance, as plain values."""
        tiny = self.args.tiny
        defaults: dict[str, Any] = {
            "model_dir": str(folder),
            "max_num_seqs": 16 if tiny else 256,
            "max_model_len": 440 if tiny else 4096,
            "block_size": 32 if self.on_cpu else 16,
            "kv_memory_bytes": (64 << 20) if tiny else (7 << 30),
            "dtype": "float32" if self.on_cpu else "bfloat16",
            "device": self.args.device,
            "stream_tokens": 16,
            # Engines share the GPU: each takes the given KV memory and checks only that this share is free.
            "engine": {} if self.on_cpu else {"gpu_memory_utilization": 0.08},
        }
        merged = defaults | changes
        merged["engine"] = defaults["engine"] | changes.get("engine", {})
        return merged

    def plain_arguments(self, folder: Path, **changes: Any) -> dict[str, Any]:
        """The same engine without our extensions, and with vLLM's own log-probabilities."""
        arguments = engine_arguments(VllmSettings(**self.settings(folder)), "")
        del arguments["worker_extension_cls"], arguments["scheduler_cls"], arguments["logprobs_mode"]
        return arguments | changes

    @contextmanager
    def pool(self, folder: ModelFolder, num_bytes: int) -> Iterator[dict[str, Any]]:
        """A local pool, removed afterwards."""
        from seer.kvpool.local import LocalPool
        from seer.kvpool.local_files import LocalPoolConfig

        home = self.args.dram_dir
        if shutil.disk_usage(home).free < 1.2 * num_bytes:
            num_bytes = int(shutil.disk_usage(home).free * 0.7)
        config = {
            "name": f"bench-{uuid.uuid4().hex[:8]}", "dram_dir": home, "dram_bytes": num_bytes, "deadline_s": 10.0,
            "block_bytes": folder.block_bytes(32 if self.on_cpu else 16, 4 if self.on_cpu else 2),
        }  # fmt: skip
        with LocalPool(LocalPoolConfig(populate=not self.on_cpu, **config)) as pool:
            try:
                yield {"backend": "local", "populate": not self.on_cpu, **config}
            finally:
                pool.close(remove=True)


class Engine:
    """A process that serves one engine."""

    def __init__(self, bench: Bench, name: str, order: dict[str, Any]) -> None:
        self.name = name
        self._bench = bench
        with (bench.args.out / f"engine-{name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "served.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        self._send(order)

    def ready(self) -> float:
        return float(self._receive()["ready_s"])

    def do(self, what: str, **job: Any) -> dict[str, Any]:
        self._send({"do": what, **job})
        return self._receive()

    def close(self) -> None:
        """End the engine with everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], max(1.0, self._bench.left_s))[0]:
            raise TimeoutError(f"engine {self.name} did not answer before the limit")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"engine {self.name} ended; see engine-{self.name}.log")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"engine {self.name}: {answer['error']}")
        return answer


@contextmanager
def engines(bench: Bench, section: str, orders: dict[str, dict[str, Any]]) -> Iterator[dict[str, Engine]]:
    """Start engines together, wait until all are ready, and stop them afterwards."""
    with ExitStack() as stack:
        started = {name: Engine(bench, f"{section}-{name}", order) for name, order in orders.items()}
        for engine in started.values():
            stack.callback(engine.close)
        bench.note(section, "ready_s", {name: round(engine.ready(), 1) for name, engine in started.items()})
        yield started


def seer(settings: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "seer", "settings": settings}


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "plain", "arguments": arguments}


_numbers = iter(range(1, 1 << 60))


def a_request(prompt: list[int], max_tokens: int, **changes: Any) -> dict[str, Any]:
    number = next(_numbers)
    return {
        "request": number, "group": number, "prompt": prompt, "max_tokens": max_tokens, "temperature": 1.0,
        "seed": number, "stop": [],
    } | changes  # fmt: skip


def random_prompt(length: int, vocab: int) -> list[int]:
    return [random.randrange(3, vocab - 1) for _ in range(length)]


# Sections


def correctness(bench: Bench) -> None:
    folder = read_folder(bench.args.smollm2)
    tokens, chunk = (64, 32) if bench.args.tiny else (256, 32)
    speculation = {"max_draft_tokens": 4, "fixed_tokens": 4}
    with bench.pool(folder, 1 << 30 if not bench.on_cpu else 32 << 20) as pool:
        settings = bench.settings(folder.path, pool=pool, speculation=speculation)
        with engines(bench, "correctness", {"a": seer(settings), "b": seer(settings)}) as (served):
            pair = [served["a"], served["b"]]
            prompts = [random_prompt(40, folder.vocab_size) for _ in range(8)]
            greedy = {"temperature": 0.0, "max_response": tokens}
            generated: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
            requests = [next(_numbers) for _ in prompts]
            for step in range(tokens // chunk):
                for side in (0, 1):
                    mine = [i for i in range(8) if (i + step) % 2 == side]
                    asked = [
                        a_request(prompts[i], chunk, request=requests[i], group=1, generated=generated[i][0], **greedy)
                        for i in mine
                    ]
                    made = pair[side].do("generate", requests=asked, at_once=8, drafts="grouped", return_tokens=True)
                    pair[side].do("pool")
                    for i, (ids, logprobs) in zip(mine, made["generated"], strict=True):
                        generated[i][0].extend(ids)
                        generated[i][1].extend(logprobs)
            moves = 8 * (tokens // chunk - 1)
            counts = [engine.do("pool") for engine in pair]
            bench.note("correctness", "pool", counts)
            alone: list[tuple[list[int], list[float]]] = []
            pair[0].do("forget")
            for prompt in prompts:
                one = [a_request(prompt, tokens, load_kv=False, **greedy)]
                alone += pair[0].do("generate", requests=one, at_once=1, return_tokens=True)["generated"]
            pair[0].do("forget")
            batch = [a_request(prompt, tokens, load_kv=False, **greedy) for prompt in prompts]
            together = pair[0].do("generate", requests=batch, at_once=8, return_tokens=True)["generated"]
            bench.note("correctness", "moves", moves)
            bench.note("correctness", "moved with drafts against alone", difference(generated, alone))
            bench.note("correctness", "batch of 8 against alone", difference(together, alone))


def difference(a: list[Any], b: list[Any]) -> dict[str, float]:
    """How many responses are equal, and the log-probability gap up to the first different token."""
    equal, gaps, compared = 0, [], 0
    for (ids_a, logprobs_a), (ids_b, logprobs_b) in zip(a, b, strict=True):
        equal += ids_a == ids_b
        for token_a, token_b, p, q in zip(ids_a, ids_b, logprobs_a, logprobs_b, strict=False):
            if token_a != token_b:
                break
            compared += 1
            gaps.append(abs(p - q))
    return {
        "equal": equal, "requests": len(a), "tokens_compared": compared,
        "gap_max": max(gaps, default=0.0), "gap_mean": statistics.fmean(gaps) if gaps else 0.0,
    }  # fmt: skip


def migration(bench: Bench) -> None:
    context = 320 if bench.args.tiny else 8192
    if bench.args.tiny:
        folder = read_folder(bench.args.smollm2)
    else:
        home = bench.args.out / "seven"
        home.mkdir(exist_ok=True)
        (home / "config.json").write_text(json.dumps(SHAPES["qwen2.5-7b"]))
        folder = read_folder(home)
    engine = {} if bench.args.tiny else {"load_format": "dummy", "gpu_memory_utilization": 0.2}
    changes: dict[str, Any] = {"max_model_len": 440 if bench.args.tiny else 9000, "engine": engine}
    with bench.pool(folder, 6 << 30 if not bench.on_cpu else 64 << 20) as pool:
        settings = bench.settings(folder.path, pool=pool, **changes)
        orders = {
            "from": seer(settings),
            "to": seer(settings | {"pool_options": {"load_async": False}}),
            "to-async": seer(settings | {"pool_options": {"load_async": True}}),
        }
        with engines(bench, "migration", orders) as served:
            rows: dict[str, list[float]] = {"load": [], "load, asynchronous": [], "prefill": [], "first prefill": []}
            warm = a_request(random_prompt(context, folder.vocab_size), 4, load_kv=False)
            for engine_process in served.values():
                engine_process.do("generate", requests=[warm], at_once=1)
            for _ in range(2 if bench.args.tiny else 6):
                prompt = random_prompt(context, folder.vocab_size)
                first = a_request(prompt, 17, max_response=4096)
                made = served["from"].do("generate", requests=[first], at_once=1, return_tokens=True)
                rows["first prefill"].append(made["wall_s"])
                served["from"].do("pool")
                more = {"request": first["request"], "generated": made["generated"][0][0], "max_response": 4096}
                for name, key in (("to", "load"), ("to-async", "load, asynchronous")):
                    moved = served[name].do("generate", requests=[a_request(prompt, 1, **more)], at_once=1)
                    rows[key].append(moved["wall_s"])
                again = a_request(random_prompt(context + 17, folder.vocab_size), 1, load_kv=False)
                rows["prefill"].append(served["to"].do("generate", requests=[again], at_once=1)["wall_s"])
            loads = {name: served[name].do("pool") for name in ("to", "to-async")}
            medians = {key: statistics.median(values) for key, values in rows.items()}
            bench.note("migration", "context_tokens", context)
            bench.note("migration", "block_bytes", pool["block_bytes"])
            bench.note("migration", "seconds to the first token", rows)
            bench.note("migration", "pool", loads)
            bench.note("migration", "cheaper by", medians["prefill"] / medians["load"])
            bench.note("migration", "cheaper by, asynchronous", medians["prefill"] / medians["load, asynchronous"])


def overhead(bench: Bench) -> None:
    for model, path in {"smollm2": bench.args.smollm2, "qwen": bench.args.qwen}.items():
        if path is None or bench.left_s < LEAST_S:
            continue
        folder = read_folder(path)
        with bench.pool(folder, 8 << 30 if not bench.on_cpu else 64 << 20) as pool:
            orders = {
                "plain": plain(bench.plain_arguments(path)),
                "seer": seer(bench.settings(path, pool=pool)),
            }
            with engines(bench, "overhead", orders) as served:
                bench.wait_for_go()
                measure_overhead(bench, model, folder, served)


def measure_overhead(bench: Bench, model: str, folder: ModelFolder, served: dict[str, Engine]) -> None:
    """The engines `plain` and `seer` in turn, by batch size."""
    prompt_tokens, new_tokens = (40, 32) if bench.args.tiny else (128, 256)
    for batch in (1, 4) if bench.args.tiny else (1, 32, 256):
        rates: dict[str, list[float]] = {"plain": [], "seer": []}
        for repeat in range(2 if bench.args.tiny else 13 if batch < 256 else 9):
            for name, found in rates.items():
                asked = [
                    a_request(random_prompt(prompt_tokens, folder.vocab_size), new_tokens) for _ in range(batch)
                ]  # fmt: skip
                made = served[name].do("generate", requests=asked, at_once=batch)
                if repeat:  # the first warms up
                    found.append(made["tokens_per_s"])
        row = {"tokens_per_s": rates, "ratio": _ratio(rates["seer"], rates["plain"])}
        bench.note("overhead", f"{model} batch {batch}", row)
    bench.note("overhead", f"{model} pool", served["seer"].do("pool"))


def drafter_orders(bench: Bench, path: Path) -> dict[str, dict[str, Any]]:
    """The chosen engines of the section drafting."""
    ngram = {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2,
    }  # fmt: skip
    orders = {
        "plain": plain(bench.plain_arguments(path)),
        "ngram": plain(bench.plain_arguments(path, speculative_config=ngram)),
        # With its own defaults: its drafts may be longer than ours where a match is long.
        "suffix": plain(bench.plain_arguments(path, speculative_config={"method": "suffix"})),
        "grouped 4": seer(bench.settings(path, speculation={"max_draft_tokens": 4})),
        "grouped 4 padded": seer(bench.settings(path, speculation={"max_draft_tokens": 4, "padding": "drafted"})),
        "grouped 4 always": seer(
            bench.settings(path, speculation={"max_draft_tokens": 4, "padding": "always", "fixed_tokens": 4})
        ),
    }
    chosen = bench.args.drafters.split(",") if bench.args.drafters else [name for name in orders if name != "suffix"]
    return {name: orders[name] for name in chosen}


def drafting(bench: Bench) -> None:
    folder = read_folder(bench.args.qwen or bench.args.smollm2)
    with engines(bench, "drafting", drafter_orders(bench, folder.path)) as served:
        measure_drafting(bench, folder, served)


def measure_drafting(bench: Bench, folder: ModelFolder, served: dict[str, Engine]) -> None:
    """Groups of a recording under every drafter, by how many requests run at once."""
    prompts = trace_prompts(bench, folder)
    new_tokens = 48 if bench.args.tiny else 512
    for engine in served.values():  # warm up graphs, kernels and budgets on prompts that are not measured
        warm = [a_request(prompts[-1], 32, group=0) for _ in range(4 if bench.args.tiny else 64)]
        engine.do("generate", requests=warm, at_once=64, drafts="grouped")
    plans = {1: (1, 4), 4: (1, 4)} if bench.args.tiny else {1: (1, 8), 16: (2, 16), 64: (8, 16), 256: (24, 16)}
    chosen = [int(one) for one in bench.args.batches.split(",")] if bench.args.batches else list(plans)
    for at_once in chosen:
        num_groups, samples = plans[at_once]
        rates: dict[str, list[float]] = {}
        for name, engine in served.items():
            if bench.left_s < LEAST_S:
                return
            runs = []
            for repeat in range(1 if bench.args.tiny else 2):
                # Samples of a group one after the other, groups side by side, as a rollout has them.
                asked = [
                    a_request(
                        prompts[(group + 7 * repeat) % len(prompts)], new_tokens, group=1 + group,
                        seed=1000 * repeat + 16 * group + sample, stop=list(folder.eos_token_ids),
                    )
                    for sample in range(samples)
                    for group in range(num_groups)
                ]  # fmt: skip
                made = engine.do("generate", requests=asked, at_once=at_once, drafts="grouped")
                rows = max(1, made["tokens"] - made["accepted"])
                made["tokens_per_row"] = made["tokens"] / rows
                made["drafted_per_token"] = made["drafted"] / rows
                made["host_ms_per_step"] = 1e3 * made["draft_host_s"] / max(1, made["steps"])
                runs.append({key: round(value, 4) for key, value in made.items()})
            bench.note("drafting", f"batch {at_once}, {name}", runs)
            rates[name] = [run["tokens_per_s"] for run in runs]
        if "plain" in rates:
            gains = {name: _ratio(values, rates["plain"]) for name, values in rates.items()}
            bench.note("drafting", f"batch {at_once}, against plain", gains)


def measure_questions(bench: Bench, folder: ModelFolder, engine: Engine) -> None:
    """Plain vLLM on the questions of benchmarks/engine/gpu.py, to compare with that engine's speculation."""
    prompts, stop = json.loads(bench.args.questions.read_text()), list(folder.eos_token_ids)
    for at_once, count in ((1, 4), (8, 16), (64, 64)):
        runs = []
        for repeat in range(3):
            asked = [
                a_request(prompts[i % len(prompts)], 300, seed=1000 * repeat + i, stop=stop) for i in range(count)
            ]  # fmt: skip
            made = engine.do("generate", requests=asked, at_once=at_once)
            if repeat:  # the first warms up
                runs.append({"tokens_per_s": made["tokens_per_s"], "tokens": made["tokens"]})
        bench.note("questions", f"batch {at_once}", runs)


def together(bench: Bench) -> None:
    """Overhead, drafting and the engine's questions on Qwen, with engines that start once: a start takes a minute."""
    folder = read_folder(bench.args.qwen or bench.args.smollm2)
    with bench.pool(folder, 8 << 30 if not bench.on_cpu else 64 << 20) as pool:
        orders = drafter_orders(bench, folder.path) | {"seer": seer(bench.settings(folder.path, pool=pool))}
        with engines(bench, "together", orders) as served:
            bench.wait_for_go()
            measure_overhead(bench, "qwen", folder, served)
            if bench.args.questions is not None:
                measure_questions(bench, folder, served["plain"])
            measure_drafting(bench, folder, {name: one for name, one in served.items() if name != "seer"})


def trace_prompts(bench: Bench, folder: ModelFolder) -> list[list[int]]:
    """The prompts of the recording, or random ones without a recording."""
    if bench.args.trace is None:
        return [random_prompt(40, folder.vocab_size) for _ in range(32)]
    import numpy as np

    trace = np.load(bench.args.trace)
    ends = np.cumsum(trace["prompt_lengths"])
    return [part.tolist() for part in np.split(trace["prompts"], ends[:-1])]


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(ours) / statistics.median(theirs), 4)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "correctness": correctness,
    "migration": migration,
    "overhead": overhead,
    "drafting": drafting,
    "together": together,
}
DEFAULT_SECTIONS = ("correctness", "migration", "overhead", "drafting")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--smollm2", type=Path, help="model folder; --tiny makes one")
    options.add_argument("--qwen", type=Path, help="folder of Qwen2.5-Coder-1.5B-Instruct")
    options.add_argument("--trace", type=Path, help="a recording, for its prompts; with --qwen, ours by default")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--limit-s", type=float, default=540)
    options.add_argument("--only", default=",".join(DEFAULT_SECTIONS), help="sections, in order (%(default)s)")
    options.add_argument("--drafters", default="", help="of the section drafting, comma separated (all)")
    options.add_argument("--batches", default="", help="of the section drafting, comma separated (all)")
    options.add_argument("--questions", type=Path, help="JSON list of token lists; see benchmarks/engine/gpu.py")
    options.add_argument(
        "--go", type=Path, help="of the sections together and overhead: start measuring when this file exists"
    )
    options.add_argument("--device", default="cuda")
    options.add_argument("--dram-dir", default="/dev/shm", help="folder of the pools (%(default)s)")
    options.add_argument("--tiny", action="store_true", help="a tiny model, to check that this script works")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    random.seed(1)
    if args.qwen is not None and args.trace is None:
        args.trace = QWEN_MIX  # its token ids are those of Qwen2.5
    if args.tiny:
        from seer.engine.local.tiny import make_tiny_model

        args.smollm2 = make_tiny_model(args.out / "tiny", head_dim=32)
    bench = Bench(args)
    for name in args.only.split(","):
        if bench.left_s < LEAST_S:
            bench.note(name, "skipped", f"{bench.left_s:.0f} s left")
            continue
        began_s = time.monotonic()
        try:
            SECTIONS[name](bench)
        except Exception:  # one section must not cost the others their time on the GPU
            bench.note(name, "failed", traceback.format_exc())
        bench.note(name, "took_s", round(time.monotonic() - began_s, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
