# SPDX-License-Identifier: Apache-2.0
"""Workloads by the name a user gives: one of the paper's three, `agent-swe`, `agent-tools`, `trace:FILE`, `synthetic`.

The paper's workloads define their model, GPUs and lengths. The others run on a cluster that the caller describes. Those
of agents have turns. An option that does not apply to a workload is refused, not ignored.
"""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from seer.errors import ConfigError
from seer.machine.memory import total_memory_bytes
from seer.ranges import (
    Count,
    LogSpread,
    Probability,
    Responses,
    Seconds,
    Seed,
    SimulatedGpus,
    SimulatedInstances,
    check_fields,
)
from seer.sim.agent_workloads import AGENT_SWE, AGENT_TOOLS, DEFAULTS, recorded_agent
from seer.sim.costs import GPUS, MODELS, InstanceCost
from seer.sim.recorded import read_lengths
from seer.sim.turns import TurnModel, plan_turns
from seer.sim.workloads import PAPER, LengthModel, Workload, instances_on, paper_workload

TRACE_PREFIX = "trace:"
SYNTHETIC = "synthetic"
AGENTS = (AGENT_SWE, AGENT_TOOLS)
"""Workloads with turns."""
NAMES = (*PAPER, *AGENTS, SYNTHETIC, f"{TRACE_PREFIX}FILE")
"""As users write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Options of a workload. None means the workload's own value, or the default given here."""

    seed: Seed = 0
    group_size: Responses | None = None
    """Responses per group. Traces: the first ones of each group, default all. Synthetic: 8."""
    instances: SimulatedInstances | None = None
    """Traces and synthetic: 8; agent-swe: 1; agent-tools: 2."""
    nodes: SimulatedInstances | None = None
    """Of eight GPUs: fills them with instances. The paper's workloads grow with them."""
    chunk_tokens: Count | None = None
    """The paper's workloads: 8,192. Others: an eighth of the maximum, between 256 and 8,192."""
    model: str | None = None
    """Traces and synthetic: llama-8b."""
    gpu: str | None = None
    """Traces and synthetic: h200."""
    num_gpus: SimulatedGpus | None = None
    """GPUs per instance. Traces and synthetic: 1."""
    prompt_tokens: Count | None = None
    """Traces: as recorded, else 512. Synthetic: 512."""
    maximum: Count | None = None
    """Longest response allowed. Traces: as recorded. Synthetic: 32,768."""
    mean: Count | None = None
    """Synthetic: 4,000."""
    sigma: LogSpread | None = None
    """Synthetic: standard deviation of the logarithm of the length, 1.0; 0 makes all lengths equal."""
    correlation: Probability | None = None
    """Synthetic: share of the variance of the logarithm that is common to a group, 0.7."""
    groups: Count | None = None
    """Synthetic: 64."""
    tool_s: Seconds | None = None
    """Agents: median seconds of a tool's call."""
    tool_sigma: LogSpread | None = None
    """Agents: standard deviation of the logarithm of these seconds; 0 makes all calls equal."""
    given_tokens: Count | None = None
    """Agents: median tokens of a tool's answer."""
    turns: Count | None = None
    """agent-tools: the most turns of a response, 12."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)


_CLUSTER = ("model", "gpu", "num_gpus", "prompt_tokens", "maximum")
"""Options that describe a cluster: the paper's workloads have their own."""
_SHAPE = ("mean", "sigma", "correlation", "groups")
"""Options that describe a length distribution: only `synthetic` and `agent-tools` have one."""
_TOOLS = ("tool_s", "tool_sigma", "given_tokens", "turns")
"""Options that describe tools: only the workloads of agents have some."""
_FLAGS = {
    "num_gpus": "--num-gpus",
    "prompt_tokens": "--prompt-tokens",
    "maximum": "--max",
    "tool_s": "--tool-s",
    "tool_sigma": "--tool-sigma",
    "given_tokens": "--given-tokens",
}
"""Options whose flag is not `--` and their name."""

REQUEST_BYTES = 2048
"""Of main memory for one simulated request: 40,000 of them took 1,768 bytes each, without drafts and events."""

T = TypeVar("T")


def load_workload(name: str, options: WorkloadOptions | None = None) -> Workload:
    """The workload of this name with these options; raises if it cannot run."""
    options = options or WorkloadOptions()
    if name not in AGENTS:
        _refuse(name, options, _TOOLS, f"its responses have no turns; use {' or '.join(AGENTS)}")
    if options.nodes is not None and options.instances is not None:
        raise ConfigError("--nodes and --instances both say how many instances there are", hint="give one of them")
    if name in PAPER:
        workload = _paper(name, options)
    elif name == AGENT_SWE:
        workload = _agent_swe(options)
    elif name == AGENT_TOOLS:
        workload = _agent_tools(options)
    elif name == SYNTHETIC:
        workload = _synthetic(options)
    elif name.startswith(TRACE_PREFIX):
        workload = _trace(name, options)
    else:
        raise _unknown(name)
    workload.check()
    return workload


def _paper(name: str, options: WorkloadOptions) -> Workload:
    _refuse(name, options, (*_CLUSTER, *_SHAPE), "it is the paper's own; use synthetic or trace:FILE")
    workload = paper_workload(
        name,
        seed=options.seed,
        group_size=options.group_size,
        num_instances=options.instances,
        num_nodes=options.nodes,
    )
    return workload if options.chunk_tokens is None else replace(workload, chunk_tokens=options.chunk_tokens)


def _agent_swe(options: WorkloadOptions) -> Workload:
    _refuse(AGENT_SWE, options, (*_SHAPE, "turns"), f"they are recorded; use {AGENT_TOOLS} to sample others")
    recorded = recorded_agent()
    options = _with_defaults(AGENT_SWE, options)
    _refuse_larger_groups(AGENT_SWE, options, recorded.tokens)
    _refuse_lower_maximum(AGENT_SWE, options, recorded.tokens)
    size = _or(options.group_size, len(recorded.tokens[0]))
    order = random.Random(options.seed).sample(range(len(recorded.tokens)), len(recorded.tokens))
    tokens, turns = ([rows[i][:size] for i in order] for rows in (recorded.tokens, recorded.turns))
    workload = _on_stated_cluster(AGENT_SWE, tuple(tokens), _or(options.maximum, 0), None, options)
    return replace(workload, turns=plan_turns(tokens, _tools(AGENT_SWE, options), options.seed, turns))


def _agent_tools(options: WorkloadOptions) -> Workload:
    options = _with_defaults(AGENT_TOOLS, replace(options, mean=_or(options.mean, 1500)))
    workload = replace(_synthetic(options), name=AGENT_TOOLS)
    return replace(workload, turns=plan_turns(workload.lengths, _tools(AGENT_TOOLS, options), options.seed))


def _with_defaults(name: str, options: WorkloadOptions) -> WorkloadOptions:
    own = DEFAULTS[name]
    return replace(
        options,
        prompt_tokens=_or(options.prompt_tokens, own.prompt_tokens),
        maximum=_or(options.maximum, own.maximum),
        instances=_or(options.instances, own.instances),
    )


def _tools(name: str, options: WorkloadOptions) -> TurnModel:
    """The workload's own, where no option says otherwise; a median outside of its range moves the range."""
    own = DEFAULTS[name].tools
    tool_s, given = _or(options.tool_s, own.tool_s.median), _or(options.given_tokens, own.given_tokens.median)
    return TurnModel(
        tool_s=replace(
            own.tool_s,
            median=tool_s,
            sigma=_or(options.tool_sigma, own.tool_s.sigma),
            least=min(tool_s, own.tool_s.least),
            most=max(tool_s, own.tool_s.most),
        ),
        given_tokens=replace(
            own.given_tokens,
            median=given,
            least=min(given, own.given_tokens.least),
            most=max(given, own.given_tokens.most),
        ),
        most_turns=_or(options.turns, own.most_turns),
    )


def _synthetic(options: WorkloadOptions) -> Workload:
    mean, maximum = _or(options.mean, 4000), _or(options.maximum, 32_768)
    sigma, correlation = _or(options.sigma, 1.0), _or(options.correlation, 0.7)
    num_groups = _or(options.groups, 64)
    if mean > maximum:
        raise ConfigError(
            f"{SYNTHETIC}: mean length {mean} is out of range", hint=f"--mean 1 to the maximum, {maximum}"
        )
    group_size = _or(options.group_size, 8)
    _refuse_too_many(num_groups, group_size)
    shape = LengthModel(mean=mean, maximum=maximum, sigma=sigma, correlation=correlation)
    lengths = shape.sample(num_groups, group_size, options.seed)
    return _on_stated_cluster(SYNTHETIC, tuple(map(tuple, lengths)), maximum, None, options)


def _refuse_too_many(num_groups: int, group_size: int) -> None:
    """Refuse what this machine cannot hold, before any length is sampled."""
    most = total_memory_bytes() // REQUEST_BYTES
    if num_groups * group_size > most:
        raise ConfigError(
            f"{SYNTHETIC}: {num_groups:,} groups of {group_size:,} are {num_groups * group_size:,} requests, "
            f"and this machine can simulate about {most:,}",
            hint=f"--groups {max(1, most // group_size):,} or less",
        )


def _trace(name: str, options: WorkloadOptions) -> Workload:
    _refuse(name, options, _SHAPE, "its lengths are recorded; use synthetic to sample others")
    path = Path(name.removeprefix(TRACE_PREFIX))
    recorded = read_lengths(path)
    groups = recorded.groups
    if options.group_size is not None:
        _refuse_larger_groups(str(path), options, groups)
        groups = tuple(row[: options.group_size] for row in groups)
    _refuse_lower_maximum(str(path), options, groups)
    maximum = _or(options.maximum, recorded.max_tokens)
    return _on_stated_cluster(name, groups, maximum, recorded.prompt_tokens, options)


def _refuse_larger_groups(name: str, options: WorkloadOptions, groups: tuple[tuple[int, ...], ...]) -> None:
    largest = max(map(len, groups))
    if options.group_size is not None and options.group_size > largest:
        raise ConfigError(
            f"group size {options.group_size}, but {name} has at most {largest} responses per group",
            hint=f"--group-size {largest} or less",
        )


def _refuse_lower_maximum(name: str, options: WorkloadOptions, groups: tuple[tuple[int, ...], ...]) -> None:
    longest = max(map(max, groups))
    if options.maximum is not None and options.maximum < longest:
        raise ConfigError(f"maximum {options.maximum}, but {name} has a response of {longest}", hint=f"--max {longest}")


def _on_stated_cluster(
    name: str,
    lengths: tuple[tuple[int, ...], ...],
    maximum: int,
    recorded_prompt_tokens: int | None,
    options: WorkloadOptions,
) -> Workload:
    prompt_tokens = _or(options.prompt_tokens, _or(recorded_prompt_tokens, 512))
    num_gpus = _or(options.num_gpus, 1)
    return Workload(
        name=name,
        lengths=lengths,
        max_tokens=maximum,
        prompt_tokens=prompt_tokens,
        cost=InstanceCost(
            model=_named("model", _or(options.model, "llama-8b"), MODELS),
            gpu=_named("GPU", _or(options.gpu, "h200"), GPUS),
            num_gpus=num_gpus,
        ),
        num_instances=_num_instances(options, num_gpus),
        # The longest response takes about as many chunks as in the paper's workloads (5 to 12 of 8,192 tokens).
        chunk_tokens=_or(options.chunk_tokens, min(8192, max(256, maximum // 8))),
    )


def _num_instances(options: WorkloadOptions, num_gpus: int) -> int:
    if options.nodes is not None:
        return instances_on(options.nodes, num_gpus)
    return _or(options.instances, 8)


def _refuse(name: str, options: WorkloadOptions, unused: tuple[str, ...], why: str) -> None:
    for option in unused:
        if getattr(options, option) is not None:
            raise ConfigError(f"{_FLAGS.get(option, f'--{option}')} does not apply to {name}", hint=why)


def _named(kind: str, name: str, known: dict[str, T]) -> T:
    if name.lower() not in known:
        raise ConfigError(f"unknown {kind} {name!r}", hint=f"one of {', '.join(known)}")
    return known[name.lower()]


def _unknown(name: str) -> ConfigError:
    if Path(name).is_file():
        return ConfigError(f"unknown workload {name!r}", hint=f"to replay a file: {TRACE_PREFIX}{name}")
    close = difflib.get_close_matches(name, (*PAPER, *AGENTS, SYNTHETIC), n=1)
    return ConfigError(
        f"unknown workload {name!r}",
        hint=f"did you mean {close[0]}?" if close else f"one of {', '.join(NAMES)}",
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
