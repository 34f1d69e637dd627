# SPDX-License-Identifier: Apache-2.0
"""What `seer simulate` prints: one row per scheduler and seed, as JSON, a table, or a table of means over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from seer.machine.sizes import show_size
from seer.sim.cluster import SimulationResult
from seer.sim.intervals import mean_of
from seer.sim.network import NetworkUse
from seer.sim.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scheduler's result, in the order and with the names that `--json` prints."""

    workload: str
    scheduler: str
    group_size: int
    seed: int
    throughput_tokens_s: float
    makespan_s: float
    tail_s: float
    group_median_s: float | None
    group_p90_s: float | None
    group_last_s: float | None
    preemptions: int
    recomputed_tokens: int
    migrations: int
    migrated_tokens: int
    idle_share: float
    oracle_share: float
    mean_accepted: float
    simulator_wall_s: float | None
    off_policy: bool
    num_requests: int
    num_tokens: int
    cancelled_tokens: int
    max_tokens: int
    prompt_tokens: int
    chunk_tokens: int
    model: str
    gpu: str
    gpus_per_instance: int
    instances: int
    speculation: str
    node_changes: int | None = None
    """Migrations to another node; this and the following where the network is simulated."""
    near_bytes: int | None = None
    """KV that moved inside nodes."""
    far_bytes: int | None = None
    saved_bytes: int | None = None
    busiest_card_share: float | None = None
    """Of the time, in which the busiest network card was at work, in one direction."""
    load_slowdown: float | None = None
    """Time of the loads from other nodes over the time they would take alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsRow(Row):
    """The result of a workload with turns."""

    while_waiting: str
    """What happened to the KV of requests that waited: park, recompute or hold."""
    num_turns: int
    given_tokens: int
    """What tools answered."""
    tool_wait_s: float
    """Seconds that requests waited for their tools, summed over them."""
    recomputed_share: float
    """Tokens computed again, over those of prompts and answers."""


def make_row(
    workload: Workload,
    result: SimulationResult,
    oracle_tokens_s: float,
    *,
    seed: int,
    speculation: str,
    timing: bool,
) -> Row:
    """What one simulation came to. Floats are rounded: more digits would claim more than a model can know."""
    summary = result.summary
    row = Row(
        workload=workload.name,
        scheduler=result.scheduler,
        group_size=workload.group_size,
        seed=seed,
        throughput_tokens_s=round(summary.throughput_tokens_s, 3),
        makespan_s=round(summary.makespan_s, 6),
        tail_s=round(summary.tail_s, 6),
        group_median_s=_rounded(summary.group_median_s),
        group_p90_s=_rounded(summary.group_p90_s),
        group_last_s=_rounded(summary.group_last_s),
        preemptions=summary.preemptions,
        recomputed_tokens=summary.recomputed_tokens,
        migrations=summary.migrations,
        migrated_tokens=summary.migrated_tokens,
        idle_share=round(summary.idle_share, 6),
        oracle_share=round(summary.throughput_tokens_s / oracle_tokens_s, 6),
        mean_accepted=round(summary.mean_accepted, 6),
        simulator_wall_s=round(result.wall_s, 3) if timing else None,
        off_policy=result.off_policy,
        num_requests=summary.num_requests,
        num_tokens=summary.num_tokens,
        cancelled_tokens=summary.cancelled_tokens,
        max_tokens=workload.max_tokens,
        prompt_tokens=workload.prompt_tokens,
        chunk_tokens=workload.chunk_tokens,
        model=workload.cost.model.name,
        gpu=workload.cost.gpu.name,
        gpus_per_instance=workload.cost.num_gpus,
        instances=workload.num_instances,
        speculation=speculation,
        **(_network_columns(summary.node_changes, result.network) if result.network is not None else {}),
    )
    return row if result.while_waiting is None else _with_turns(row, workload, result.while_waiting)


def _with_turns(row: Row, workload: Workload, while_waiting: str) -> TurnsRow:
    given = sum(sum(one.given) for one in workload.turns)
    values = {field.name: getattr(row, field.name) for field in fields(Row)}
    return TurnsRow(
        **values,
        while_waiting=while_waiting,
        num_turns=sum(len(one.ends) for one in workload.turns),
        given_tokens=given,
        tool_wait_s=round(sum(sum(one.tool_s) for one in workload.turns), 3),
        recomputed_share=round(row.recomputed_tokens / (workload.num_requests * workload.prompt_tokens + given), 6),
    )


def _network_columns(node_changes: int, use: NetworkUse) -> dict[str, Any]:
    return {
        "node_changes": node_changes,
        "near_bytes": round(use.near_bytes),
        "far_bytes": round(use.far_bytes),
        "saved_bytes": round(use.saved_bytes),
        "busiest_card_share": round(max(use.busiest_read_share, use.busiest_save_share), 6),
        "load_slowdown": round(use.load_s / use.alone_s, 6) if use.alone_s else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def describe(workload: Workload, seeds: Sequence[int]) -> str:
    """The workload and its cluster in one line; the lengths are those of the first seed."""
    cost = workload.cost
    turns = f"{_turns_of(workload)}; " if workload.turns else ""
    return (
        f"{workload.name}: {len(workload.lengths):,} groups of {workload.group_size}, "
        f"{workload.num_requests:,} responses, mean {workload.num_tokens / workload.num_requests:,.0f}, "
        f"longest {max(map(max, workload.lengths)):,} of {workload.max_tokens:,} tokens; {turns}"
        f"{cost.model.name} on {workload.num_instances} instances of {cost.num_gpus} x {cost.gpu.name}; "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    )


def _turns_of(workload: Workload) -> str:
    calls_s = sorted(seconds for one in workload.turns for seconds in one.tool_s)
    given = sum(sum(one.given) for one in workload.turns)
    return (
        f"{len(calls_s):,} turns, tools take {calls_s[len(calls_s) // 2]:.1f} s (median) and up to {calls_s[-1]:.0f} s "
        f"and give {given / workload.num_requests:,.0f} tokens per response, prompts have {workload.prompt_tokens:,}"
    )


def print_table(console: Console, rows: Sequence[Row]) -> None:
    """One line per scheduler of one seed; ratios are to the first."""
    first = rows[0]
    table = Table(
        caption=f"x: throughput relative to {_name(first)}; of oracle: of seer-oracle, without speculation, same "
        f"lengths; groups s: until half and 90% of the groups were complete{_about_waiting(first)}"
    )
    table.add_column("scheduler", no_wrap=True)
    columns = "tokens/s,x,of oracle,total s,tail s,groups s,preempted,recomputed,migrations,idle,accepted,simulated in"
    for column in columns.split(","):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            _name(row),
            f"{row.throughput_tokens_s:,.0f}",
            f"{row.throughput_tokens_s / first.throughput_tokens_s:.2f}",
            f"{row.oracle_share:.1%}",
            f"{row.makespan_s:,.1f}",
            f"{row.tail_s:,.1f}",
            "-" if row.group_median_s is None else f"{row.group_median_s:,.0f} / {row.group_p90_s:,.0f}",
            f"{row.preemptions:,}",
            f"{row.recomputed_tokens:,}",
            f"{row.migrations:,}",
            f"{row.idle_share:.1%}",
            f"{row.mean_accepted:.2f}",
            "-" if row.simulator_wall_s is None else f"{row.simulator_wall_s:.1f} s",
        )
    console.print(table)
    for row in rows:
        if row.far_bytes is not None:
            console.print(_network_line(row), highlight=False, soft_wrap=True)


def _network_line(row: Row) -> str:
    """What the network carried."""
    inside = 1.0 - (row.node_changes or 0) / max(1, row.migrations)
    near, far, saved = (show_size(num_bytes or 0) for num_bytes in (row.near_bytes, row.far_bytes, row.saved_bytes))
    slower = "" if row.load_slowdown is None else f", loads took {row.load_slowdown:.2f} times as long as alone"
    return (
        f"{_name(row)}: {inside:.0%} of the moves stayed inside a node; {near} of KV moved there, {far} came from "
        f"other nodes, {saved} went to them; the busiest card worked {row.busiest_card_share or 0:.0%} of the time"
        f"{slower}"
    )


def print_means(console: Console, rows: Sequence[Row]) -> None:
    """One line per scheduler: the mean over the seeds with its interval and, below, the range. Ratios are by seed."""
    first = _name(rows[0])
    base = {row.seed: row.throughput_tokens_s for row in rows if _name(row) == first}
    columns: list[tuple[str, str, Callable[[Row], float | None]]] = [
        ("tokens/s", "{:,.0f}", lambda row: row.throughput_tokens_s),
        ("x", "{:.2f}", lambda row: row.throughput_tokens_s / base[row.seed]),
        ("of oracle", "{:.1%}", lambda row: row.oracle_share),
        ("total s", "{:,.0f}", lambda row: row.makespan_s),
        ("tail s", "{:,.0f}", lambda row: row.tail_s),
        ("half of groups s", "{:,.0f}", lambda row: row.group_median_s),
        ("90% of groups s", "{:,.0f}", lambda row: row.group_p90_s),
        ("preempted", "{:,.0f}", lambda row: row.preemptions),
        ("idle", "{:.1%}", lambda row: row.idle_share),
    ]
    table = Table(
        caption=f"mean over {len(base)} seeds ± half of its 95% interval, range below; x: throughput relative to "
        f"{first} on the same seed; of oracle: of seer-oracle, without speculation, same "
        f"lengths{_about_waiting(rows[0])}",
        show_lines=True,
    )
    table.add_column("scheduler")
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for name in dict.fromkeys(map(_name, rows)):
        mine = [row for row in rows if _name(row) == name]
        table.add_row(name, *(_mean_and_range(mine, form, value) for _, form, value in columns))
    console.print(table)


def _mean_and_range(rows: Sequence[Row], form: str, value: Callable[[Row], float | None]) -> str:
    values = [number for number in map(value, rows) if number is not None]
    if not values:
        return "-"
    mean, half_width = mean_of(values)
    spread = form.format(half_width).removesuffix("%")
    return f"{form.format(mean)} ±{spread}\n{form.format(min(values))}..{form.format(max(values))}"


def _name(row: Row) -> str:
    name = f"{row.scheduler}, {row.while_waiting}" if isinstance(row, TurnsRow) else row.scheduler
    return f"{name} (off-policy)" if row.off_policy else name


def _about_waiting(row: Row) -> str:
    if not isinstance(row, TurnsRow):
        return ""
    return "; park, recompute, hold: what happens to the KV of requests that wait for their tools"
