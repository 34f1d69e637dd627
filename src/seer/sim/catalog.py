# SPDX-License-Identifier: Apache-2.0
"""Workloads by the name a user gives: one of the paper's three, `trace:FILE`, or `synthetic`.

The paper's workloads define their model, GPUs and lengths. Traces and synthetic lengths run on a cluster that the
caller describes. An option that does not apply to a workload is refused, not ignored.
"""

from __future__ import annotations

import difflib
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
    Seed,
    SimulatedGpus,
    SimulatedInstances,
    check_fields,
)
from seer.sim.costs import GPUS, MODELS, InstanceCost
from seer.sim.recorded import read_lengths
from seer.sim.workloads import PAPER, LengthModel, Workload, paper_workload

TRACE_PREFIX = "trace:"
SYNTHETIC = "synthetic"
NAMES = (*PAPER, SYNTHETIC, f"{TRACE_PREFIX}FILE")
"""As users write them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Options of a workload. None means the workload's own value, or the default given here."""

    seed: Seed = 0
    group_size: Responses | None = None
    """Responses per group. Traces: the first ones of each group, default all. Synthetic: 8."""
    instances: SimulatedInstances | None = None
    """Traces and synthetic: 8."""
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

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        check_fields(self)


_CLUSTER = ("model", "gpu", "num_gpus", "prompt_tokens", "maximum")
"""Options that describe a cluster: the paper's workloads have their own."""
_SHAPE = ("mean", "sigma", "correlation", "groups")
"""Options that describe a length distribution: only `synthetic` has one."""
_FLAGS = {"num_gpus": "--num-gpus", "prompt_tokens": "--prompt-tokens", "maximum": "--max"}
"""Options whose flag is not `--` and their name."""

REQUEST_BYTES = 2048
"""Of main memory for one simulated request: 40,000 of them took 1,768 bytes each, without drafts and events."""

T = TypeVar("T")


def load_workload(name: str, options: WorkloadOptions | None = None) -> Workload:
    """The workload of this name with these options; raises if it cannot run."""
    options = options or WorkloadOptions()
    if name in PAPER:
        workload = _paper(name, options)
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
    workload = paper_workload(name, seed=options.seed, group_size=options.group_size, num_instances=options.instances)
    return workload if options.chunk_tokens is None else replace(workload, chunk_tokens=options.chunk_tokens)


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
        largest = max(map(len, groups))
        if options.group_size > largest:
            raise ConfigError(
                f"group size {options.group_size}, but {path} has at most {largest} responses per group",
                hint=f"--group-size {largest} or less",
            )
        groups = tuple(row[: options.group_size] for row in groups)
    longest = max(map(max, groups))
    if options.maximum is not None and options.maximum < longest:
        raise ConfigError(f"maximum {options.maximum}, but {path} has a response of {longest}", hint=f"--max {longest}")
    maximum = _or(options.maximum, recorded.max_tokens)
    return _on_stated_cluster(name, groups, maximum, recorded.prompt_tokens, options)


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
        num_instances=_or(options.instances, 8),
        # The longest response takes about as many chunks as in the paper's workloads (5 to 12 of 8,192 tokens).
        chunk_tokens=_or(options.chunk_tokens, min(8192, max(256, maximum // 8))),
    )


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
    close = difflib.get_close_matches(name, (*PAPER, SYNTHETIC), n=1)
    return ConfigError(
        f"unknown workload {name!r}",
        hint=f"did you mean {close[0]}?" if close else f"one of {', '.join(NAMES)}",
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
