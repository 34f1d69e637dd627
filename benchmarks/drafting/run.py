# SPDX-License-Identifier: Apache-2.0
"""Measure every claim about drafting, ours and arctic-inference in the same run, and write results.md.

    python benchmarks/drafting/run.py [--traces DIR] [--rounds 3] [--quick] [--only SECTION ...]

Reads the recordings in ../recordings (--traces names another folder with files of the same names). arctic-inference is
fetched from PyPI and built on first use. Rounds alternate between ours and arctic, so that a busy machine slows both.
The tables give the median and the range.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import acceptance
import calibration
import numpy as np
import server_load
import sharing
import speed
from peers import VERSION, load_arctic
from streams import edited, stitched

from seer.drafting.recording import RecordedGroup, read_groups
from stamp import QWEN_MIX, RECORDINGS, as_text, print_stamp

HERE = Path(__file__).parent
SETS = ("drafts_game24", "drafts_humaneval", "drafts_long_code")
SECTIONS = ("speed", "acceptance", "efficiency", "sharing", "confidence", "server")
SECTIONS_WITH_ARCTIC = ("speed", "acceptance", "efficiency")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=RECORDINGS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, one round, ten-second load")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="print these sections and write nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    args = parser.parse_args()
    began = time.time()
    stamp = print_stamp(args, arctic_inference=VERSION)
    names = args.only or SECTIONS
    # Building arctic takes a minute, and some sections do not compare with it.
    module = load_arctic() if set(names) & set(SECTIONS_WITH_ARCTIC) else None
    sets = {name: read_groups(args.traces / f"{name}.npz") for name in SETS}
    extra = args.traces / QWEN_MIX.name
    rounds = 1 if args.quick else args.rounds
    all_sets = dict(sets) | ({extra.stem: read_groups(extra)} if extra.exists() else {})
    texts = [section(name, module, sets, all_sets, rounds, args.quick) for name in names]
    whole = "\n".join([head(stamp, rounds, time.time() - began), *texts])
    if args.only is None:
        args.out.write_text(whole)
    print(whole)
    return 0


def section(  # noqa: PLR0917 - one call for all kinds of section
    name: str,
    module: ModuleType | None,
    sets: dict[str, list[RecordedGroup]],
    all_sets: dict[str, list[RecordedGroup]],
    rounds: int,
    quick: bool,
) -> str:
    """Measure one section. Sections without arctic also use the recording of Qwen2.5-Coder."""
    if name in SECTIONS_WITH_ARCTIC:
        assert module is not None, f"{name} compares with arctic"
        return compared_section(name, module, sets, rounds, quick)
    if name == "sharing":
        batches = (32,) if quick else (32, 64, 128)
        chosen = {key: groups[:64] for key, groups in all_sets.items() if len(groups) >= 64}
        return sharing_table({key: sharing.compare(groups, batches) for key, groups in chosen.items()})
    if name == "confidence":
        return reliability_table(
            row for key, groups in all_sets.items() for row in calibration.measure(key, groups, 15)
        )
    load_s = 10.0 if quick else 60.0
    loads = [
        ("steady", server_load.measure(load_s, 200_000.0, kill=False)),
        ("server killed and restarted half-way", server_load.measure(load_s / 2, 200_000.0, kill=True)),
    ]
    return load_table(load_s, loads)


def compared_section(
    name: str, module: ModuleType, sets: dict[str, list[RecordedGroup]], rounds: int, quick: bool
) -> str:
    """Measure one section that compares with arctic."""
    if name == "speed":
        return speed_table([row for number in range(rounds) for row in measure_speed(module, sets, number, quick)])
    if name == "acceptance":
        references = (0, 15) if quick else (0, 1, 5, 15)
        modes = ["linear-8", "tree-8", "tree-32"]
        rows = [acceptance.compare(module, key, groups, references, modes) for key, groups in sets.items()]
        return acceptance_table([row for some in rows for row in some])
    return efficiency_table(
        acceptance.tokens_for_equal_acceptance(module, key, groups, 15) for key, groups in sets.items()
    )


def measure_speed(
    module: ModuleType, sets: dict[str, list[RecordedGroup]], seed: int, quick: bool
) -> list[speed.Timing]:
    book = sets["drafts_long_code"]
    rows: list[speed.Timing] = []
    sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000)
    for size in sizes:
        kinds = (("stitched", stitched), ("edited", edited))
        for kind, make in kinds if size < 1_000_000 else kinds[:1]:
            rows += speed.append_rate(module, f"{kind} {size:,} tokens", make(book, size, seed))
            gc.collect()
    steps = 48
    length = 100_000 + 16 * speed.STEP_TOKENS * steps * len(speed.MODES)
    worlds = [stitched(book, length, 100 * seed + group) for group in range(speed.COLD_GROUPS)]
    rows += speed.cold_ours(worlds, steps)
    for depth in speed.DEPTHS:
        rows += speed.cold_arctic(module, worlds, depth, steps)
        gc.collect()
    worlds = [stitched(book, 25_000, 100 * seed + group) for group in range(64)]
    rows += speed.batch_of_256(module, worlds, rounds=30)
    rows += speed.warm_and_rebuild(stitched(book, 1_000_000, seed))
    rows += speed.loops(module)
    return rows


def head(stamp: dict[str, Any], rounds: int, took_s: float) -> str:
    return "\n".join(
        [
            "# Drafting: measured",
            "",
            as_text(stamp),
            "",
            f"{rounds} rounds, {took_s / 60:.0f} minutes. arctic is the suffix extension of arctic-inference.",
            "Values are medians over rounds, the range in brackets; ratios are of the medians.",
            "Speeds are CPU time of the calling thread.",
            "",
        ]
    )


def speed_table(timings: Sequence[speed.Timing]) -> str:
    lines = [
        "## Speed and memory",
        "",
        "| | ours | arctic 24 | arctic 64 | better by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what in dict.fromkeys(timing.what for timing in timings):
        cells, medians = [], {}
        unit = next(timing.unit for timing in timings if timing.what == what)
        for who in ("ours", "arctic 24", "arctic 64"):
            values = [timing.value for timing in timings if timing.what == what and timing.who == who]
            if values:
                medians[who] = float(np.median(values))
                cells.append(f"{medians[who]:.3g} ({min(values):.3g}-{max(values):.3g})")
            else:
                cells.append("")
        ratios = [
            medians["ours"] / value if unit == "Mtok/s" else value / medians["ours"]
            for who, value in medians.items()
            if who != "ours"
        ]
        lines.append(f"| {what}, {unit} | {' | '.join(cells)} | {' / '.join(f'{r:.1f}x' for r in ratios)} |")
    return "\n".join([*lines, ""])


def acceptance_table(rows: Iterable[acceptance.Comparison]) -> str:
    lines = [
        "## Accepted tokens per step (bonus token counted; drafted per step in brackets)",
        "",
        "| set | references | draft | arctic uncapped | ours | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row.set_name} | {row.references} | {row.mode} | {row.arctic:.3f} ({row.arctic_drafted:.1f}) "
            f"| {row.ours:.3f} ({row.ours_drafted:.1f}) | {100 * (row.ours / row.arctic - 1):+.1f}% |"
        )
    return "\n".join([*lines, "", "Deterministic: no spread.", ""])


def efficiency_table(rows: Iterable[acceptance.Efficiency]) -> str:
    lines = [
        "## Drafted tokens for what arctic accepts uncapped (linear, at most 8, 15 references)",
        "",
        "| set | accepted per step | arctic drafts | ours drafts at most | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row.set_name} | {row.accepted:.3f} | {row.arctic_drafted:.2f} | {row.ours_drafted:.2f} "
            f"| {row.ours_drafted / row.arctic_drafted:.2f}x |"
        )
    return "\n".join([*lines, ""])


def sharing_table(found: Mapping[str, Sequence[sharing.Shared]]) -> str:
    lines = [
        "## Draft tokens of a batch: the same for each request, or by confidence (throughput over no drafts)",
        "",
        "| set | batch | rows | same for each | by confidence | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key, rows in found.items():
        for row in rows:
            form = "padded to the longest" if row.is_padded else "as many as drafted"
            gain = 100 * (row.by_confidence / row.same - 1)
            lines.append(f"| {key} | {row.batch} | {form} | {row.same:.3f} | {row.by_confidence:.3f} | {gain:+.1f}% |")
    return "\n".join([*lines, ""])


def reliability_table(rows: Iterable[calibration.Reliability]) -> str:
    lines = [
        "## Confidence error (15 references; warmed on every other group, measured on the rest)",
        "",
        "| set | draft | nodes | uncorrected, mean | corrected, mean | worst bin with 1% of nodes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row.set_name} | {row.mode} | {row.nodes:,} | {row.raw_mean_error:.3f} "
            f"| {row.mean_error:.3f} | {row.worst_bin:.3f} |"
        )
    return "\n".join([*lines, "", "Deterministic: no spread.", ""])


def load_table(seconds: float, loads: Sequence[tuple[str, dict[str, float]]]) -> str:
    lines = [
        f"## Draft server: two clients on loopback, {seconds:.0f} s ({seconds / 2:.0f} s with the kill)",
        "",
        "| | tokens/s in (and as many out) | lag p50 / p99 / max, ms | decode-side call p50 / p99, ms "
        "| server memory, B/token | all tokens on the server at the end |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, load in loads:
        complete = load["all_shipped"] and load["tokens"] == load["tokens_on_server"]
        lines.append(
            f"| {name} | {load['tokens_per_s']:,.0f} "
            f"| {load['lag_p50_ms']:.0f} / {load['lag_p99_ms']:.0f} / {load['lag_max_ms']:.0f} "
            f"| {load['step_p50_ms']:.2f} / {load['step_p99_ms']:.2f} "
            f"| {load['server_bytes_per_token']:.2f} | {'yes' if complete else 'no'} |"
        )
    note = "The decode-side call is one observe_batch and one draft of 8 for 128 requests; it never waits."
    return "\n".join([*lines, "", note, ""])


if __name__ == "__main__":
    sys.exit(main())
