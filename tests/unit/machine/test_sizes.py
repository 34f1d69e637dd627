# SPDX-License-Identifier: Apache-2.0
import pytest

from seer.errors import ConfigError
from seer.machine.sizes import parse_size, show_size


def test_sizes_are_read_as_people_write_them() -> None:
    sizes = {"4096": 4096, "0": 0, "64KiB": 65536, "1.5GiB": 3 << 29, "2 mib": 2 << 20, "2G": 2 << 30, "1TiB": 1 << 40}
    assert {text: parse_size(text) for text in sizes} == sizes


def test_a_unit_without_i_is_a_power_of_1000() -> None:
    assert [parse_size(text) for text in ("512MB", "1.5GB", "7 kb")] == [512_000_000, 1_500_000_000, 7_000]


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "1.GiB", "1GiBs", "GiB", "1e9", "1 Gi B", "\u0663GiB", "1,5GiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size") as problem:
        parse_size(text)
    assert problem.value.hint is not None
    assert "GiB" in problem.value.hint


def test_sizes_are_written_as_people_read_them() -> None:
    assert [show_size(n) for n in (0, 12, 65536, 3 << 29, 1 << 40)] == ["0 B", "12 B", "64.0 KiB", "1.5 GiB", "1.0 TiB"]
