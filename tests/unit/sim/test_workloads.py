# SPDX-License-Identifier: Apache-2.0
"""Workloads by name: the paper's, recorded and synthetic lengths, and every way to get them wrong."""

import gzip
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seer.errors import ConfigError, InputError, SeerError
from seer.sim.catalog import WorkloadOptions, load_workload
from seer.sim.recorded import read_lengths
from seer.sim.workloads import PAPER, LengthModel

TABLE_3 = {
    "moonlight": (3200, 8, 32, 22_386, 65_536),
    "qwen2-vl-72b": (9600, 16, 16, 7_615, 40_960),
    "kimi-k2": (6400, 8, 8, 38_959, 98_304),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_workloads_carry_its_table_3(name: str) -> None:
    workload = load_workload(name)
    requests, group_size, instances, mean, maximum = TABLE_3[name]
    assert (workload.num_requests, workload.group_size, workload.num_instances) == (
        requests,
        group_size,
        instances,
    )
    assert workload.num_tokens / workload.num_requests == pytest.approx(mean, rel=0.001)
    assert workload.max_tokens == maximum == max(map(max, workload.lengths))


def test_another_group_size_keeps_the_number_of_requests() -> None:
    workload = load_workload("moonlight", WorkloadOptions(group_size=16))
    assert (workload.group_size, workload.num_requests) == (16, 3200)


def test_the_seed_alone_decides_the_lengths() -> None:
    first, again = load_workload("moonlight"), load_workload("moonlight")
    other = load_workload("moonlight", WorkloadOptions(seed=1))
    assert first.lengths == again.lengths != other.lengths


def test_a_seed_arranges_the_same_lengths_anew() -> None:
    shape = LengthModel(mean=1000, maximum=5000, sigma=1.0, correlation=0.8)
    first, second = (shape.sample(60, 4, seed) for seed in (0, 1))
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second))
    assert sorted(chain(*first)) == sorted(chain(*shape.sample(30, 8, 0)))  # groups of another size too


def test_lengths_correlate_within_a_group_as_asked() -> None:
    lengths = LengthModel(mean=1000, maximum=10**9, sigma=1.0, correlation=0.7).sample(4000, 2, seed=3)
    first, second = np.log(np.array(lengths)).T
    assert float(np.corrcoef(first, second)[0, 1]) == pytest.approx(0.7, abs=0.03)


def test_sigma_0_makes_all_lengths_equal() -> None:
    workload = load_workload("synthetic", WorkloadOptions(sigma=0.0, mean=500, groups=3, group_size=2))
    assert len({length for row in workload.lengths for length in row}) == 1


def write_json(path: Path, content: object) -> Path:
    raw = json.dumps(content).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def test_json_traces_may_have_groups_of_unequal_size(tmp_path: Path) -> None:
    for name in ("lengths.json", "lengths.json.gz"):
        path = write_json(tmp_path / name, {"groups": [[1200, 900, 5], [300]], "max_tokens": 16384})
        workload = load_workload(f"trace:{path}")
        assert workload.lengths == ((1200, 900, 5), (300,))
        assert (workload.max_tokens, workload.num_instances) == (16384, 8)
        assert (workload.cost.model.name, workload.cost.gpu.name, workload.cost.num_gpus) == (
            "llama-8b",
            "H200",
            1,
        )


def test_npz_traces_come_as_a_matrix_or_flat_with_group_sizes(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "matrix.npz",
        lengths=np.array([[5, 6], [7, 8]], np.int32),
        prompt_lengths=np.array([10, 20]),
    )
    np.savez(tmp_path / "flat.npz", lengths=np.array([5, 6, 7]), group_sizes=np.array([1, 2]), max_tokens=100)
    matrix, flat = read_lengths(tmp_path / "matrix.npz"), read_lengths(tmp_path / "flat.npz")
    assert (matrix.groups, matrix.max_tokens, matrix.prompt_tokens) == (((5, 6), (7, 8)), 8, 15)
    assert (flat.groups, flat.max_tokens, flat.prompt_tokens) == (((5,), (6, 7)), 100, None)


def test_a_group_size_keeps_the_first_responses_of_a_trace(tmp_path: Path) -> None:
    path = write_json(tmp_path / "t.json", {"groups": [[1, 2, 3], [4]]})
    assert load_workload(f"trace:{path}", WorkloadOptions(group_size=2)).lengths == ((1, 2), (4,))
    with pytest.raises(ConfigError, match="at most 3"):
        load_workload(f"trace:{path}", WorkloadOptions(group_size=4))


def npz(**arrays: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "missing": ("t.json", lambda path: None),
    "folder": ("t.json", lambda path: path.mkdir()),
    "empty file": ("t.json", lambda path: path.touch()),
    "not json": ("t.json", lambda path: path.write_text("{groups}")),
    "a list": ("t.json", lambda path: path.write_text("[[1, 2]]")),
    "no groups": ("t.json", lambda path: path.write_text('{"lengths": [[1]]}')),
    "zero groups": ("t.json", lambda path: path.write_text('{"groups": []}')),
    "empty group": ("t.json", lambda path: path.write_text('{"groups": [[1], []]}')),
    "zero length": ("t.json", lambda path: path.write_text('{"groups": [[1, 0]]}')),
    "text length": ("t.json", lambda path: path.write_text('{"groups": [["long"]]}')),
    "fraction": ("t.json", lambda path: path.write_text('{"groups": [[1.5]]}')),
    "over the maximum": ("t.json", lambda path: path.write_text('{"groups": [[100]], "max_tokens": 50}')),
    "not gzipped": ("t.json.gz", lambda path: path.write_text('{"groups": [[1]]}')),
    "cut gzip": ("t.json.gz", lambda path: path.write_bytes(gzip.compress(b'{"groups": [[1]]}')[:-9])),
    "another kind": ("t.csv", lambda path: path.write_text("1,2")),
    "not an npz": ("t.npz", lambda path: path.write_bytes(b"PK garbage")),
    "npz without lengths": ("t.npz", npz(tokens=np.array([1]))),
    "npz of floats": ("t.npz", npz(lengths=np.array([[1.0]]))),
    "npz of objects": ("t.npz", npz(lengths=np.array([[1], [2, 3]], dtype=object))),
    "npz flat": ("t.npz", npz(lengths=np.array([1, 2]))),
    "npz with a zero": ("t.npz", npz(lengths=np.array([[1, 0]]))),
    "npz without groups": ("t.npz", npz(lengths=np.zeros((0, 4), int))),
    "npz with empty groups": ("t.npz", npz(lengths=np.zeros((4, 0), int))),
    "npz with wrong sizes": ("t.npz", npz(lengths=np.array([1, 2]), group_sizes=np.array([1]))),
    "npz with a negative size": ("t.npz", npz(lengths=np.array([1]), group_sizes=np.array([2, -1]))),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_trace_is_refused_with_a_hint(case: str, tmp_path: Path) -> None:
    name, write = BROKEN[case]
    write(tmp_path / name)
    with pytest.raises(InputError) as caught:
        load_workload(f"trace:{tmp_path / name}")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("moonlght", {}, "unknown workload"),
        ("moonlight", {"instances": 0}, "instances=0"),
        ("moonlight", {"group_size": 0}, "group_size=0"),
        ("moonlight", {"seed": -1}, "seed=-1"),
        ("moonlight", {"model": "llama-8b"}, "--model does not apply"),
        ("moonlight", {"mean": 3}, "--mean does not apply"),
        ("moonlight", {"num_gpus": 3}, "--num-gpus does not apply"),
        ("moonlight", {"chunk_tokens": 0}, "chunk_tokens=0"),
        ("synthetic", {"model": "gpt-5"}, "unknown model"),
        ("synthetic", {"gpu": "abacus"}, "unknown GPU"),
        ("synthetic", {"model": "kimi-k2"}, "holds the KV of 0"),
        ("synthetic", {"maximum": 10**7}, "one request may reach"),
        ("synthetic", {"mean": 10**6}, "mean length"),
        ("synthetic", {"groups": 0}, "groups=0"),
        ("synthetic", {"groups": 10**9}, "this machine can simulate about"),
        ("synthetic", {"sigma": -1.0}, "sigma"),
        ("synthetic", {"sigma": float("nan")}, "sigma=nan"),
        ("synthetic", {"correlation": 1.5}, "correlation"),
        ("synthetic", {"prompt_tokens": 0}, "prompt_tokens=0"),
        ("synthetic", {"num_gpus": 0}, "num_gpus=0"),
    ],
)
def test_impossible_wishes_are_refused_with_a_hint(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(SeerError, match=message) as caught:
        load_workload(name, WorkloadOptions(**options))  # type: ignore[arg-type]
    assert caught.value.hint


def test_a_file_given_as_a_workload_is_pointed_at_trace(tmp_path: Path) -> None:
    path = write_json(tmp_path / "t.json", {"groups": [[1]]})
    with pytest.raises(ConfigError) as caught:
        load_workload(str(path))
    assert f"trace:{path}" in (caught.value.hint or "")
