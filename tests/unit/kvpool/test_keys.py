# SPDX-License-Identifier: Apache-2.0
"""Keys name a block by everything its bytes depend on, the same in every process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from seer.errors import ConfigError
from seer.kvpool.keys import (
    KEY_BYTES,
    KeyChain,
    KVLayout,
    Namespace,
    as_key_array,
    block_keys,
    chain_hash,
    keys_of_part,
    namespace_digest,
    token_bytes,
)

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_size=4)
CONTENT = slice(16, 32)
"""Of a key: the chained content hash."""
SPACE = Namespace(model="m", weights_version=3, layout=LAYOUT)


def as_set(keys: np.ndarray) -> set[bytes]:
    return {bytes(k) for k in keys}


def test_only_full_blocks_have_keys() -> None:
    assert [len(block_keys(SPACE, range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert block_keys(SPACE, range(8)).shape == (2, KEY_BYTES)


def test_a_key_depends_on_all_tokens_before_it_and_on_none_after() -> None:
    base = block_keys(SPACE, range(12))
    changed_first = block_keys(SPACE, [99, *range(1, 12)])
    changed_last = block_keys(SPACE, [*range(11), 99])
    assert not as_set(base) & as_set(changed_first)
    assert np.array_equal(base[:2], changed_last[:2])
    assert not np.array_equal(base[2], changed_last[2])


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SPACE, model="n"),
        dataclasses.replace(SPACE, weights_version=4),
        dataclasses.replace(SPACE, salt="adapter"),
        *(
            dataclasses.replace(SPACE, layout=dataclasses.replace(LAYOUT, **change))
            for change in (
                {"num_layers": 5}, {"num_kv_heads": 1}, {"head_dim": 16}, {"dtype": "float16"},
                {"kind": "latent"}, {"num_ranks": 2},
            )
        ),
    ],
)  # fmt: skip
def test_another_namespace_shares_no_key_and_no_content_hash(other: Namespace) -> None:
    mine, theirs = block_keys(SPACE, range(40)), block_keys(other, range(40))
    assert not as_set(mine) & as_set(theirs)
    assert not {k[CONTENT] for k in as_set(mine)} & {k[CONTENT] for k in as_set(theirs)}


def test_the_parts_of_a_block_have_different_keys_of_one_weights_version() -> None:
    keys = [bytes(key) for key in block_keys(SPACE, range(40))]
    parts = [list(keys_of_part(keys, part)) for part in range(8)]
    assert parts[0] == keys
    assert len({key for part in parts for key in part}) == 8 * len(keys)
    assert {key[:8] for part in parts for key in part} == {(3).to_bytes(8, "little")}


def test_a_chain_fed_token_by_token_gives_the_same_keys() -> None:
    chain, got = KeyChain(SPACE), []
    for token in range(11):
        got += [bytes(k) for k in chain.extend([token])]
    assert got == [bytes(k) for k in block_keys(SPACE, range(11))]
    assert chain.num_blocks == 2


def test_the_content_is_the_shared_chain_hash() -> None:
    first = chain_hash(namespace_digest(SPACE), token_bytes([0, 1, 2, 3]))
    second = chain_hash(first, token_bytes([4, 5, 6, 7]))
    assert [bytes(k)[CONTENT] for k in block_keys(SPACE, range(8))] == [first, second]


def test_keys_agree_between_processes_whatever_the_hash_seed() -> None:
    program = (
        "from seer.kvpool.keys import *;"
        "s=Namespace(model='m',weights_version=3,layout=KVLayout(num_layers=4,num_kv_heads=2,head_dim=8,"
        "dtype='bfloat16',block_size=4));print(block_keys(s,range(8)).tobytes().hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout.strip()
        for seed in ("0", "1")
    }  # fmt: skip
    assert seen == {block_keys(SPACE, range(8)).tobytes().hex()}


def test_keys_do_not_change_between_versions_of_this_file() -> None:
    """A pool outlives an upgrade of one of its users: who changes this changes the format tag too."""
    expected = "030000000000000054301541ae43775b" + "1558d159651a014a7ba292d1da1eabed"
    assert block_keys(SPACE, range(4)).tobytes().hex() == expected


def test_the_weights_version_stands_at_the_start_of_a_key() -> None:
    assert bytes(block_keys(SPACE, range(4))[0][:8]) == (3).to_bytes(8, "little")


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint16])
def test_the_type_of_the_token_array_does_not_matter(dtype: type) -> None:
    assert np.array_equal(block_keys(SPACE, np.arange(8, dtype=dtype)), block_keys(SPACE, list(range(8))))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="32 unsigned bits"):
        block_keys(SPACE, [-1, 0, 0, 0])
    with pytest.raises(TypeError, match="integers"):
        block_keys(SPACE, np.zeros(4))
    with pytest.raises(ConfigError, match="differs from layout"):
        block_keys(SPACE, range(8), block_size=8)
    with pytest.raises(ConfigError, match="weights_version"):
        dataclasses.replace(SPACE, weights_version=-1)
    with pytest.raises(TypeError, match="32 bytes"):
        as_key_array([b"x"])
    with pytest.raises(TypeError, match="uint8"):
        as_key_array(np.zeros((2, 16), np.uint8))


def test_block_bytes_counts_both_halves_or_the_latent() -> None:
    assert LAYOUT.block_bytes(2) == 2 * 4 * 2 * 8 * 4 * 2
    assert dataclasses.replace(LAYOUT, kind="latent", num_kv_heads=1, head_dim=576).block_bytes(2) == 4 * 576 * 4 * 2
