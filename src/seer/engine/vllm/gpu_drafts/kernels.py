# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
# ruff: noqa: N803, PLR0917
# (Triton's dialect of Python: kernels have no types, and capitals mark what is fixed at compile time.)
"""Triton kernels over the token arena and the n-gram table. `tests/unit/engine` runs them against a Python twin.

arena   int32 [A]  Every sequence of a group has a region of its own. -1 stands where no token is known yet, and in at
                   least K places at the end of each region.
table   int64 [T]  T is a power of two, direct mapped. An entry is a 31-bit fingerprint and the arena index of the token
                   that came after the context: (fingerprint << 32) | index. 0 is empty. The key is (group, n, the n
                   tokens before).

Invariants
  1. A newer entry replaces an older one, of the same key or not. A false match costs a rejected draft, never a token.
  2. Contexts are hashed from the newest token backwards, so one pass gives the hashes of all orders.
  3. Where nothing is known, a draft repeats the last token: every request has exactly K, which keeps batches uniform.
"""

from __future__ import annotations

import triton
import triton.language as tl

MULTIPLY = tl.constexpr(-7046029254386353131)
MIX = tl.constexpr(-4658895280553007687)
GROUP = tl.constexpr(-7723592293110705685)
"""Odd 64-bit constants of splitmix64 and its kin: one multiplication spreads every bit upwards."""


def power_of_2(least: int) -> int:
    """The smallest power of two that is not below; the width of a Triton block."""
    return 1 << (least - 1).bit_length()


@triton.jit
def _key(hashed, n: tl.constexpr):
    """The table's key of a context of n tokens; shifts are arithmetic, hence the masks."""
    x = hashed + n * 366666666666667
    x = x ^ ((x >> 29) & 0x7FFFFFFFF)
    x = x * MIX
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@triton.jit
def clear_kernel(region_ptr, base_ptr, size_ptr, arena_ptr, BLOCK: tl.constexpr):
    """Fill regions with -1: what an earlier sequence left there must not be drafted."""
    region = tl.load(region_ptr + tl.program_id(0)).to(tl.int64)
    base = tl.load(base_ptr + region)
    size = tl.load(size_ptr + region)
    for i in range(0, size, BLOCK):
        q = i + tl.arange(0, BLOCK)
        tl.store(arena_ptr + base + q, tl.full([BLOCK], -1, tl.int32), mask=q < size)


@triton.jit
def _index(
    base,
    group,
    start,
    end,
    arena_ptr,
    table_ptr,
    MASK: tl.constexpr,
    ORDERS: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Enter the contexts of a region's tokens from `start` to `end` into the table."""
    seed = group * GROUP + 12345
    for i in range(start, end, BLOCK):
        q = i + tl.arange(0, BLOCK)
        hashed = tl.zeros([BLOCK], dtype=tl.int64) + seed
        for n in tl.static_range(1, MAX_N + 1):
            inside = (q < end) & (q >= n)
            token = tl.load(arena_ptr + base + q - n, mask=inside, other=0).to(tl.int64)
            hashed = (hashed ^ (token + 1)) * MULTIPLY
            if (ORDERS >> n) & 1:
                x = _key(hashed, n)
                entry = (((x >> 33) & 0x7FFFFFFF) << 32) | (base + q)
                tl.store(table_ptr + (x & MASK), entry, mask=inside)


@triton.jit
def learn_kernel(
    rows_ptr,
    tokens_ptr,
    tokens_stride,
    total_ptr,
    region_of_row_ptr,
    base_ptr,
    limit_ptr,
    first_ptr,
    known_ptr,
    group_ptr,
    arena_ptr,
    table_ptr,
    MASK: tl.constexpr,
    ORDERS: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Append each row's new tokens to its region, then enter their contexts into the table."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    region = tl.load(region_of_row_ptr + row).to(tl.int64)
    if region >= 0:
        base = tl.load(base_ptr + region)
        known = tl.load(known_ptr + region)
        end = tl.minimum(tl.load(total_ptr + row), tl.load(limit_ptr + region))
        for i in range(known, end, BLOCK):
            q = i + tl.arange(0, BLOCK)
            token = tl.load(tokens_ptr + row * tokens_stride + q, mask=q < end, other=-1)
            tl.store(arena_ptr + base + q, token.to(tl.int32), mask=q < end)
        tl.debug_barrier()  # contexts are read back from the arena by other threads of the block
        start = tl.maximum(known, tl.load(first_ptr + region))
        _index(base, tl.load(group_ptr + region), start, end, arena_ptr, table_ptr, MASK, ORDERS, MAX_N, BLOCK)
        tl.store(known_ptr + region, tl.maximum(end, known))


@triton.jit
def receive_kernel(
    region_ptr,
    start_ptr,
    offset_ptr,
    count_ptr,
    tokens_ptr,
    base_ptr,
    limit_ptr,
    known_ptr,
    group_ptr,
    arena_ptr,
    table_ptr,
    MASK: tl.constexpr,
    ORDERS: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Append tokens that came from elsewhere to their regions, then enter their contexts into the table."""
    at = tl.program_id(0)
    region = tl.load(region_ptr + at)
    start = tl.load(start_ptr + at)
    offset = tl.load(offset_ptr + at)
    base = tl.load(base_ptr + region)
    end = tl.minimum(start + tl.load(count_ptr + at), tl.load(limit_ptr + region))
    for i in range(start, end, BLOCK):
        q = i + tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + offset + q - start, mask=q < end, other=-1)
        tl.store(arena_ptr + base + q, token, mask=q < end)
    tl.debug_barrier()  # contexts are read back from the arena by other threads of the block
    _index(base, tl.load(group_ptr + region), start, end, arena_ptr, table_ptr, MASK, ORDERS, MAX_N, BLOCK)
    tl.store(known_ptr + region, end.to(tl.int32))


@triton.jit
def draft_kernel(
    rows_ptr,
    num_sampled_ptr,
    last_ptr,
    tokens_ptr,
    tokens_stride,
    total_ptr,
    group_of_row_ptr,
    arena_ptr,
    table_ptr,
    drafts_ptr,
    counts_ptr,
    MASK: tl.constexpr,
    ORDERS: tl.constexpr,
    MAX_N: tl.constexpr,
    K: tl.constexpr,
    K_POWER_OF_2: tl.constexpr,
):
    """Draft for each row what came after the longest context of it that its group has seen."""
    b = tl.program_id(0)
    row = tl.load(rows_ptr + b).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + b)
    group = tl.load(group_of_row_ptr + row)
    length = tl.load(total_ptr + row)
    can_draft = (group >= 0) & (num_sampled > 0)
    last = tl.load(last_ptr + row).to(tl.int64)
    hashed = group * GROUP + 12345
    found = group * 0 - 1
    for n in tl.static_range(1, MAX_N + 1):
        inside = can_draft & (length >= n)
        token = tl.load(tokens_ptr + row * tokens_stride + length - n, mask=inside, other=0).to(tl.int64)
        hashed = (hashed ^ (token + 1)) * MULTIPLY
        if (ORDERS >> n) & 1:
            x = _key(hashed, n)
            entry = tl.load(table_ptr + (x & MASK), mask=inside, other=0)
            hit = inside & (entry != 0) & ((entry >> 32) == ((x >> 33) & 0x7FFFFFFF))
            found = tl.where(hit, entry & 0xFFFFFFFF, found)
    k = tl.arange(0, K_POWER_OF_2)
    place = found + k
    token = tl.load(arena_ptr + place, mask=(place >= k) & (k < K), other=-1).to(tl.int64)
    tl.store(drafts_ptr + b * K + k, tl.where(token >= 0, token, last), mask=k < K)
    tl.atomic_add(counts_ptr, (num_sampled > 0).to(tl.int64))
    tl.atomic_add(counts_ptr + 1, (found >= 0).to(tl.int64))


@triton.jit
def accept_kernel(sampled_ptr, input_ptr, start_ptr, out_ptr, out_stride, num_ptr, WIDTH: tl.constexpr):
    """Accept drafts while they equal what was sampled in their place; the first sample that differs ends the step."""
    b = tl.program_id(0)
    start = tl.load(start_ptr + b)
    count = tl.load(start_ptr + b + 1) - start
    i = tl.arange(0, WIDTH)
    sampled = tl.load(sampled_ptr + start + i, mask=i < count, other=-2).to(tl.int64)
    draft = tl.load(input_ptr + start + i + 1, mask=i + 1 < count, other=-3).to(tl.int64)
    num_accepted = tl.min(tl.where((i + 1 < count) & (sampled == draft), WIDTH, i), axis=0)
    num_accepted = tl.minimum(num_accepted, count - 1)
    tl.store(out_ptr + b * out_stride + i, sampled, mask=(i < count) & (i <= num_accepted))
    tl.store(num_ptr + b, num_accepted + 1)
