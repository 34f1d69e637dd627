# SPDX-License-Identifier: Apache-2.0
"""GPUs and CPU cores are given to instances by rule; no machine is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from seer.errors import ConfigError
from seer.machine.cores import assign_cores, numa_nodes
from seer.machine.gpus import assign_gpus, assign_more_gpus, parse_gpus, refuse_invisible, visible_value

TWO_NODES = [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10, 11]]


def test_a_list_of_gpus_has_numbers_and_ranges() -> None:
    assert parse_gpus("0,1,4-7") == (0, 1, 4, 5, 6, 7)
    assert parse_gpus(" 3 ") == (3,)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0,0", "2-1", "0-2,1", "-1"])
def test_a_list_that_names_no_gpu_or_one_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="gpus="):
        parse_gpus(text)


def test_every_instance_has_gpus_of_its_own() -> None:
    assert assign_gpus(range(8), 8) == [(gpu,) for gpu in range(8)]
    assert assign_gpus((0, 1, 4, 5), 2, 2) == [(0, 1), (4, 5)]
    assert assign_gpus(range(8), 3) == [(0,), (1,), (2,)]


def test_too_few_gpus_are_refused_with_numbers_and_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"8 instances need 8 GPUs, got 2 \(0, 1\)") as few:
        assign_gpus((0, 1), 8)
    assert "share_gpus" in (few.value.hint or "")
    with pytest.raises(ConfigError, match="3 instances of 2 GPUs each need 6 GPUs, got 5"):
        assign_gpus(range(5), 3, 2)
    with pytest.raises(ConfigError, match="1 instance needs 1 GPU, got 0") as none:
        assign_gpus((), 1)
    assert "device='cpu'" in (none.value.hint or "")


def test_gpus_are_shared_in_turn_where_that_is_asked_for() -> None:
    assert assign_gpus((2, 3), 5, share=True) == [(2,), (3,), (2,), (3,), (2,)]
    assert assign_gpus(range(5), 3, 2, share=True) == [(0, 1), (2, 3), (0, 1)]
    with pytest.raises(ConfigError, match="of 4 GPUs each"):  # ranks of one instance never share a GPU
        assign_gpus((0, 1), 1, 4, share=True)


def test_a_gpu_that_is_not_visible_is_refused() -> None:
    refuse_invisible((0, 7), 8)
    with pytest.raises(ConfigError, match="no GPU 8, 9: 8 are visible"):
        refuse_invisible((7, 8, 9), 8)


def test_a_child_sees_its_gpus_by_the_names_that_this_process_has_for_them() -> None:
    assert visible_value((1, 3), None) == "1,3"
    assert visible_value((1,), "4,5,6") == "5"
    assert visible_value((0, 1), "GPU-aa, GPU-bb") == "GPU-aa,GPU-bb"


def test_a_range_that_goes_downwards_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match="gpus='0,4-1'") as refused:
        parse_gpus("0,4-1")
    assert refused.value.hint == "a range goes upwards: 1-4"


def test_an_instance_has_cores_of_one_numa_node_and_nodes_take_turns() -> None:
    allowed = range(12)
    assert assign_cores(allowed, TWO_NODES, 3) == [(0,), (4,), (1,)]
    assert assign_cores(allowed, TWO_NODES, 4, 2) == [(0, 1), (4, 5), (2, 3), (6, 7)]
    for cores in assign_cores(allowed, TWO_NODES, 6, 2):
        assert any(set(cores) <= set(node) for node in TWO_NODES)


def test_only_cores_that_this_process_may_use_are_given() -> None:
    assert assign_cores({1, 5, 6}, TWO_NODES, 4) == [(1,), (5,), (6,), (1,)]
    assert assign_cores({0, 4}, TWO_NODES, 2, 2) == [(0, 4), (0, 4)]  # no node has two of them
    assert assign_cores({0}, TWO_NODES, 2, 2) == [(0,), (0,)]
    assert assign_cores({0, 1}, [], 3) == [(0,), (1,), (0,)]  # a kernel that lists no nodes


def test_nodes_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    for number, text in ((0, "0-3,8-9\n"), (1, "4-7,10,11\n"), (2, "\n")):  # the last has memory only
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    assert numa_nodes(tmp_path) == TWO_NODES
    assert numa_nodes(tmp_path / "none") == []


def test_instances_that_join_get_free_gpus_or_share_the_least_used() -> None:
    assert assign_more_gpus({0: 1, 2: 1}, range(8), 2, 2) == [(1, 3), (4, 5)]
    assert assign_more_gpus({0: 2, 1: 1}, range(3), 4, share=True) == [(2,), (1,), (0,), (2,)]
    with pytest.raises(ConfigError, match=r"2 more instances need 4 GPU\(s\), 3 of 4 are free \(0, 2, 3\)") as few:
        assign_more_gpus({1: 1}, range(4), 2, 2)
    assert "remove_instances" in str(few.value.hint)
