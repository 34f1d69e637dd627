# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
# ruff: noqa: D103, N803, N806, PLR0915, PLR0917, SIM102
# (Triton's dialect of Python: kernels have no types, and capitals mark what is fixed at compile time.)
"""The embedded engine's Triton kernels: everything on a GPU except the matrix products.

Each batched token is one row. One int32 array, `rows` [6][capacity] (uniform_rows.py has the order), describes them
all, so that a step needs one copy to the device, or none:

    TOKEN     its token id             VISIBLE   leading positions of its sequence slot's table that it attends to
    POSITION  its absolute position    NODES     bit j: it attends to row `node_first + j` of its tile's tree
    SLOT      where its KV goes        SEQ_SLOT  its sequence slot: its row of the block tables

Attention works tile by tile, `tiles` [3][count]: first row, number of rows (0: padding), first node row.

Shapes that change the code are constexpr. Everything else is data, so that one captured graph serves any content.
Arguments that differ from batch to batch are not specialised: otherwise Triton would compile a kernel again in the
middle of a rollout, for about a second, when a count becomes 1 or divisible by 16, or a pointer is aligned differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIRST, COUNT, NODE_FIRST = range(3)
"""Fields of a tile."""
MAX_NODES = 31
"""Draft nodes per tree: bits of NODES, an int32, without its sign."""


@triton.jit
def add_rms_norm_kernel(
    x, hidden, weight, out, dim, eps, HAS_X: tl.constexpr, BLOCK: tl.constexpr
):  # one program per row
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    value = tl.load(hidden + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        value += tl.load(x + row * dim + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * dim + at, value, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / dim + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * dim + at, value * scale * gain, mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + at, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit(do_not_specialize=["capacity"])
def rotate_store_kernel(  # one program per row and head: queries, then keys, then values
    qkv, q_norm, k_norm, cosine, sine, rows, capacity, cache, layer_offset, block_stride, eps,
    NORM: tl.constexpr, H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, D // 2)
    base = qkv + (row * (H + 2 * HKV) + head) * D
    a = tl.load(base + half).to(tl.float32)
    b = tl.load(base + D // 2 + half).to(tl.float32)
    slot = tl.load(rows + 2 * capacity + row).to(tl.int64)
    into = cache + (slot // BT) * block_stride + layer_offset
    if head >= H + HKV:
        value = into + (HKV + head - H - HKV) * D * BT + (slot % BT) * D
        tl.store(value + half, a)
        tl.store(value + D // 2 + half, b)
    else:
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)
            gain = q_norm if head < H else k_norm
            a = a * scale * tl.load(gain + half).to(tl.float32)
            b = b * scale * tl.load(gain + D // 2 + half).to(tl.float32)
        position = tl.load(rows + 1 * capacity + row).to(tl.int64)
        c = tl.load(cosine + position * (D // 2) + half)
        s = tl.load(sine + position * (D // 2) + half)
        first = a * c - b * s
        second = b * c + a * s
        tl.store(base + half, first)
        tl.store(base + D // 2 + half, second)
        if head >= H:
            key = into + (head - H) * D * BT + slot % BT
            tl.store(key + half * BT, first)
            tl.store(key + (D // 2 + half) * BT, second)


@triton.jit(do_not_specialize=["capacity", "num_tiles", "table_width", "num_splits"])
def attention_kernel(  # one program per tile, KV head and part of the context
    qkv, cache, tables, rows, capacity, tiles, num_tiles, out, parts, stats,
    layer_offset, block_stride, table_width, num_splits, scale,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, NODE_ROWS: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(tiles + tile)
    count = tl.load(tiles + num_tiles + tile)
    G: tl.constexpr = H // HKV
    W: tl.constexpr = (H + 2 * HKV) * D
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    head = kv_head * G + m % G
    row = (first + m // G).to(tl.int64)
    live = m // G < count
    q = tl.load(qkv + row[:, None] * W + head[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    visible = tl.load(rows + 3 * capacity + row, mask=live, other=0)
    longest = tl.max(visible, 0)
    seq_slot = tl.load(rows + 5 * capacity + first).to(tl.int64)
    size = tl.cdiv(tl.cdiv(longest, BLOCK_N), num_splits) * BLOCK_N
    start = split * size
    stop = tl.minimum(start + size, longest)
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    keys = cache + layer_offset + kv_head * D * BT
    values = cache + layer_offset + (HKV + kv_head) * D * BT
    for base in range(start, stop, BLOCK_N):
        n = tl.multiple_of(base, BLOCK_N) + tl.arange(0, BLOCK_N)
        inside = n < stop
        block = tl.load(tables + seq_slot * table_width + n // BT, mask=n // BT * BT < stop, other=0).to(tl.int64)
        # The hint that the positions of a block share it lets the compiler load keys in pieces of 16 bytes, not of 2.
        # A mask would prevent that. None is needed: positions from `stop` on are masked in the scores.
        block = tl.max_constancy(block, BT)
        k = tl.load(keys + block[None, :] * block_stride + d[:, None] * BT + (n % BT)[None, :])
        seen = (n[None, :] < visible[:, None]) & inside[None, :]
        s = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, -1.0e30)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.where(seen, tl.exp(s - new_top[:, None]), 0.0)
        fade = tl.exp(top - new_top)
        v = tl.load(
            values + block[:, None] * block_stride + (n % BT)[:, None] * D + d[None, :],
            mask=inside[:, None], other=0.0,
        )  # fmt: skip
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    if NODE_ROWS > 0:
        if split == 0:  # the tree's own keys and values are rows of this very step
            j = tl.arange(0, NODE_ROWS)
            mask = tl.load(rows + 4 * capacity + row, mask=live, other=0)
            node = (tl.load(tiles + 2 * num_tiles + tile) + j).to(tl.int64)
            used = tl.max(mask, 0) >> j != 0
            at = qkv + node * W + (H + kv_head) * D
            k = tl.load(at[None, :] + d[:, None], mask=used[None, :], other=0.0)
            seen = ((mask[:, None] >> j[None, :]) & 1) != 0
            s = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, -1.0e30)
            new_top = tl.maximum(top, tl.max(s, 1))
            p = tl.where(seen, tl.exp(s - new_top[:, None]), 0.0)
            fade = tl.exp(top - new_top)
            v = tl.load(at[:, None] + HKV * D + d[None, :], mask=used[:, None], other=0.0)
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = new_top
    place = row * H + head
    if SPLIT:
        place = place * num_splits + split
        tl.store(parts + place[:, None] * D + d[None, :], acc, mask=live[:, None])
        tl.store(stats + place * 2, top, mask=live)
        tl.store(stats + place * 2 + 1, total, mask=live)
    else:
        tl.store(out + place[:, None] * D + d[None, :], acc / tl.maximum(total, 1e-30)[:, None], mask=live[:, None])


@triton.jit(do_not_specialize=["num_splits"])
def join_parts_kernel(  # one program per row and head
    parts, stats, out, num_splits, D: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS)
    there = split < num_splits
    d = tl.arange(0, D)
    top = tl.load(stats + (place * num_splits + split) * 2, mask=there, other=-1.0e30)
    total = tl.load(stats + (place * num_splits + split) * 2 + 1, mask=there, other=0.0)
    weight = tl.exp(top - tl.max(top, 0))
    part = tl.load(parts + (place * num_splits + split)[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
    joined = tl.sum(part * weight[:, None], 0) / tl.maximum(tl.sum(total * weight, 0), 1e-30)
    tl.store(out + place * D + d, joined)


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["moves"])
def move_kernel(  # programs share the moves among them; one each per layer and KV head
    cache, moves, capacity, block_stride, HKV: tl.constexpr, D: tl.constexpr, BT: tl.constexpr
):
    layer, head = tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    keys = cache + layer * 2 * HKV * D * BT + head * D * BT
    values = keys + HKV * D * BT
    for move in range(tl.program_id(0), capacity, tl.num_programs(0)):
        source = tl.load(moves + move).to(tl.int64)
        if source >= 0:  # -1: nothing to move
            target = tl.load(moves + capacity + move).to(tl.int64)
            a, b = (source // BT) * block_stride, (target // BT) * block_stride
            tl.store(keys + b + d * BT + target % BT, tl.load(keys + a + d * BT + source % BT))
            tl.store(values + b + (target % BT) * D + d, tl.load(values + a + (source % BT) * D + d))


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(token, low, high):
    bits = _mix32(_mix32(token.to(tl.uint32) ^ low) + high)
    upper = (bits >> 16).to(tl.int32).to(tl.float32)
    lower = (bits & 0xFFFF).to(tl.int32).to(tl.float32)
    uniform = upper * 1.52587890625e-05 + (lower + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)
    left = 1.0 - uniform
    delta = left - 1.0
    exponential = tl.where(delta == 0.0, uniform, tl.log(left) * (uniform / tl.where(delta == 0.0, -1.0, delta)))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["sample_rows"])
def sample_part_kernel(  # one program per row and part of the vocabulary
    logits, sample_rows, rows, capacity, seeds, inverse_temperature, parts, vocab, part_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(sample_rows + place).to(tl.int64)
    seq_slot = tl.load(rows + 5 * capacity + row).to(tl.int64)
    position = tl.load(rows + 1 * capacity + row).to(tl.int64) + 1  # of the token to be sampled
    key = _mix64(tl.load(seeds + seq_slot).to(tl.uint64) ^ position.to(tl.uint64))
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    inverse = tl.load(inverse_temperature + seq_slot)  # 0 is greedy
    top = -1.0e30
    raw_total = 0.0
    total = 0.0
    best = -1.0e30
    second = -1.0e30
    best_token = 0
    best_logit = 0.0
    stop = tl.minimum((part + 1) * part_size, vocab)
    for base in range(part * part_size, stop, BLOCK):
        v = base + tl.arange(0, BLOCK)
        inside = v < stop
        x = tl.load(logits + place * vocab + v, mask=inside, other=-1.0e30).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        raw_total = raw_total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        if inverse == 1.0:  # the common case: the distribution is the model's own
            total = raw_total
        else:
            total = total * tl.exp((top - new_top) * inverse) + tl.sum(
                tl.where(inside, tl.exp((x - new_top) * inverse), 0.0), 0
            )
        top = new_top
        score = tl.where(inverse > 0.0, x * inverse + _gumbel(v, low, high), x)
        score = tl.where(inside, score, -1.0e30)
        here = tl.max(score, 0)
        token = tl.min(tl.where(score == here, v, 2147483647), 0)
        runner_up = tl.max(tl.where(v == token, -1.0e30, score), 0)
        second = tl.maximum(tl.maximum(second, runner_up), tl.minimum(best, here))
        if here > best:
            best = here
            best_token = token
            best_logit = tl.max(tl.where(v == token, x, -1.0e30), 0)
    at = parts + (place * PARTS + part) * 8
    tl.store(at, top)
    tl.store(at + 1, raw_total)
    tl.store(at + 2, total)
    tl.store(at + 3, best)
    tl.store(at + 4, second)
    tl.store(at + 5, best_logit)
    tl.store(at + 6, best_token.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["sample_rows"])
def sample_join_kernel(  # one program per sampled row
    parts, sample_rows, rows, capacity, inverse_temperature, sampled, tokens, positions,
    PARTS: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(sample_rows + place).to(tl.int64)
    seq_slot = tl.load(rows + 5 * capacity + row).to(tl.int64)
    inverse = tl.load(inverse_temperature + seq_slot)
    at = parts + (place * PARTS + tl.arange(0, PARTS)) * 8
    top, raw_total, total = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    best, second, logit = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    token = tl.load(at + 6).to(tl.int32, bitcast=True)
    highest = tl.max(top, 0)
    raw_sum = tl.sum(raw_total * tl.exp(top - highest), 0)
    processed_sum = tl.sum(total * tl.exp((top - highest) * inverse), 0)
    winner = tl.max(best, 0)
    # The lowest token among equals, as everywhere.
    chosen = tl.min(tl.where(best == winner, token, 2147483647), 0)
    mine = token == chosen
    chosen_logit = tl.max(tl.where(mine, logit, -1.0e30), 0)
    behind = tl.maximum(tl.max(tl.where(mine, -1.0e30, best), 0), tl.max(second, 0))
    # A NaN or +inf among the logits is in `raw_sum`. If all are -inf, what is left are the values of padding.
    raw_logprob = tl.where(highest > -1.0e30, chosen_logit - highest - tl.log(raw_sum), float("nan"))
    logprob = tl.where(inverse > 0.0, (chosen_logit - highest) * inverse - tl.log(processed_sum), 0.0)
    tl.store(sampled + place * 4, chosen.to(tl.float32, bitcast=True))
    tl.store(sampled + place * 4 + 1, logprob)
    tl.store(sampled + place * 4 + 2, raw_logprob)
    tl.store(sampled + place * 4 + 3, winner - behind)
    if ADVANCE:
        tl.store(tokens + seq_slot, chosen)
        tl.store(positions + seq_slot, tl.load(positions + seq_slot) + 1)


@triton.jit(do_not_specialize=["table_width", "capacity"])
def next_rows_kernel(  # one program per sequence slot of a decode step: lay out its row from the slot's own state
    seq_slots, tokens, positions, limits, tables, table_width, rows, capacity, BT: tl.constexpr
):
    row = tl.program_id(0)
    seq_slot = tl.load(seq_slots + row).to(tl.int64)
    # A chunk past its limit repeats its last reserved position until the host looks at the results.
    position = tl.minimum(tl.load(positions + seq_slot), tl.load(limits + seq_slot))
    block = tl.load(tables + seq_slot * table_width + position // BT)
    tl.store(rows + row, tl.load(tokens + seq_slot))
    tl.store(rows + 1 * capacity + row, position)
    tl.store(rows + 2 * capacity + row, block * BT + position % BT)
    tl.store(rows + 3 * capacity + row, position + 1)
    tl.store(rows + 4 * capacity + row, 0)
    tl.store(rows + 5 * capacity + row, seq_slot.to(tl.int32))
