# SPDX-License-Identifier: Apache-2.0
"""Which KV blocks the vLLM connector moves, and that their bytes arrive; without an engine."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from seer.errors import ConfigError
from seer.kvpool.keys import KVLayout, Namespace, block_keys, part_key
from seer.kvpool.none import NonePool
from vllm_engines import needs_vllm

pytestmark = needs_vllm

BLOCK = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=BLOCK)


class MemoryPool(NonePool):
    """Holds blocks in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[bytes, bytes] = {}
        self.freed: list[str] = []
        self.lookups = 0

    def lookup_now(self, keys: Any) -> int:
        self.lookups += 1
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def pin(self, request_id: str, keys: Any) -> int:
        return self.lookup_now(keys)

    def put_now(self, keys: Any, buffers: Any, owners: Any = None) -> list[bool]:
        self.blocks.update({key: bytes(buffer) for key, buffer in zip(keys, buffers, strict=True)})
        return [True] * len(keys)

    def get_now(self, keys: Any, buffers: Any) -> list[bool]:
        found = []
        for key, buffer in zip(keys, buffers, strict=True):
            found.append(key in self.blocks)
            if key in self.blocks:
                memoryview(buffer).cast("B")[:] = self.blocks[key]
        return found

    def free(self, request_id: str) -> int:
        self.freed.append(request_id)
        return 0


@dataclass
class ARequest:
    """The attributes of vLLM's request that the plan reads."""

    request_id: str
    tokens: list[int]
    facts: dict[str, Any]
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    status: Any = None
    sampling_params: Any = field(init=False)

    def __post_init__(self) -> None:
        from vllm.v1.request import RequestStatus

        self.status = RequestStatus.RUNNING
        self.sampling_params = SimpleNamespace(extra_args={"seer": self.facts})

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens


def a_request(name: str, num_tokens: int, *, prompt: int | None = None, **facts: Any) -> ARequest:
    known = {
        "request": 7, "group": 0, "weights_version": 0, "model": "m", "num_prompt_tokens": prompt or num_tokens,
        "attempt": 0, "max_left": 1000, "load": True, "has_turns": False, "num_fresh": 0, "run": "", "drafts": "none",
    }  # fmt: skip
    return ARequest(name, list(range(100, 100 + num_tokens)), known | facts)


def a_plan(pool: Any, *, drafts: int = 0, **options: Any) -> Any:
    from seer.config import TransferOptions
    from seer.engine.vllm.connector_plan import Plan

    defaults = {"flush_blocks": 1, "flush_steps": 1, "near_deadline_s": 0.0}
    return Plan(pool, LAYOUT, "", tokens_per_step=1 + drafts, options=TransferOptions(**defaults | options))


def step(plan: Any, *, new: Any = (), cached: Any = (), resumed: Any = ()) -> Any:
    """One step of the scheduler: `new` and `cached` are (request id, blocks it was given)."""
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in cached],
            new_block_ids=[(blocks,) if blocks else None for _, blocks in cached],
            resumed_req_ids=set(resumed),
        ),
    )
    return plan.step(output)


def enter(plan: Any, request: ARequest, blocks: list[int]) -> Any:
    assert plan.matched_tokens(request, 0)[0] == 0
    return step(plan, new=[(request.request_id, blocks)])


def saved(*steps: Any) -> list[int]:
    return [block for meta in steps for job in meta.saves for block in job.blocks]


def test_blocks_are_saved_once_as_they_become_final() -> None:
    plan, request = a_plan(MemoryPool()), a_request("a", 9)
    steps = [enter(plan, request, [10, 11, 12])]
    request.num_computed_tokens = 8
    steps += [step(plan), step(plan)]
    assert saved(*steps) == [10, 11]
    for token in range(5):
        request.num_computed_tokens += 1
        request.tokens.append(token)
        steps.append(step(plan))
    assert saved(*steps) == [10, 11, 12]


def test_keys_are_those_of_the_pool() -> None:
    plan, request = a_plan(MemoryPool()), a_request("a", 14, weights_version=3)
    enter(plan, request, [1, 2, 3, 4])
    namespace = Namespace(model="m", weights_version=3, layout=LAYOUT, salt="")
    assert plan._tracked["a"].keys == [key.tobytes() for key in block_keys(namespace, request.tokens)]


def test_a_block_with_tokens_that_may_be_rejected_is_not_saved() -> None:
    plan, request = a_plan(MemoryPool(), drafts=4), a_request("a", 6)
    steps = [enter(plan, request, [10, 11, 12])]
    # vLLM counts drafts of a step in flight as computed; the known tokens end in the middle of block 11.
    request.num_computed_tokens = 12
    steps += [step(plan), step(plan), step(plan)]
    assert saved(*steps) == [10]


def test_pending_blocks_are_dropped_with_a_preemption_and_saved_from_their_new_place() -> None:
    from vllm.v1.request import RequestStatus

    plan, request = a_plan(MemoryPool(), flush_blocks=100, flush_steps=3), a_request("a", 9)
    enter(plan, request, [10, 11, 12])
    request.num_computed_tokens = 8
    steps = [step(plan)]
    request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
    steps += [step(plan) for _ in range(5)]
    assert saved(*steps) == []
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 8
    steps += [step(plan, cached=[("a", [20, 21, 22])], resumed=["a"]), *(step(plan) for _ in range(5))]
    assert saved(*steps) == [20, 21]


def test_the_end_of_a_chunk_saves_the_rest_and_the_end_of_a_request_frees_it() -> None:
    from vllm.v1.request import RequestStatus

    pool = MemoryPool()
    plan = a_plan(pool, flush_blocks=100, flush_steps=100)
    chunk, over = a_request("a", 9), a_request("b", 9, request=8, max_left=3)
    enter(plan, chunk, [10, 11, 12])
    enter(plan, over, [20, 21, 22])
    for request in (chunk, over):
        request.num_computed_tokens = 12
        request.tokens += [1, 2, 3]
        request.num_output_tokens = 3
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    plan.finish(chunk, [10, 11, 12])
    plan.finish(over, [20, 21, 22])
    meta = step(plan)
    # 12 tokens are known, the last one's KV was never computed: block 12 is not final.
    assert saved(meta) == [10, 11]
    assert meta.frees == ["8"]


def test_blocks_of_the_pool_are_loaded_after_the_computed_ones_and_not_saved_again() -> None:
    pool = MemoryPool()
    plan, first = a_plan(pool), a_request("a", 13)
    steps = [enter(plan, first, [10, 11, 12, 13])]
    first.num_computed_tokens = 12
    steps += [step(plan), step(plan)]
    for job in (job for meta in steps for job in meta.saves):
        pool.put_now(job.keys, [b"x"] * len(job.keys))
    second = a_request("b", 13)
    assert plan.matched_tokens(second, BLOCK) == (2 * BLOCK, False)
    plan.load_into(second, [30, 31, 32, 33], 2 * BLOCK)
    second.num_computed_tokens = 12
    meta = step(plan, new=[("b", [30, 31, 32, 33])])
    assert [job.blocks for job in meta.loads] == [[31, 32]]
    assert saved(step(plan), step(plan)) == []
    other_weights_version = a_request("c", 13, weights_version=1)
    assert plan.matched_tokens(other_weights_version, 0) == (0, False)


def test_it_asks_again_for_the_last_blocks_of_a_context_that_another_instance_still_saves() -> None:
    pool = MemoryPool()
    plan, request = a_plan(pool, near_deadline_s=60.0, ask_again_s=0.0), a_request("a", 13, prompt=4)
    assert plan.matched_tokens(request, BLOCK) == (None, False)
    pool.blocks.update(dict.fromkeys(plan._tracked["a"].keys, b""))
    assert plan.matched_tokens(request, BLOCK) == (2 * BLOCK, False)
    fresh = a_request("b", 13, request=9, model="other")
    assert plan.matched_tokens(fresh, 0) == (0, False), "a prompt that no instance has computed is not waited for"


# Bytes


def test_after_a_change_of_weights_the_versions_so_far_are_dropped_once() -> None:
    plan = a_plan(MemoryPool())
    for version in (3, 4, 4):
        enter(plan, a_request(f"v{version}", 9, weights_version=version), [10, 11, 12])
    assert plan.take_versions() == {3, 4}
    assert plan.take_versions() == set()
    plan.matched_tokens(a_request("later", 9, weights_version=5), 0)
    assert plan.take_versions() == {5}


def kv_memory(num_blocks: int = 40, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    # Heads before tokens, as vLLM's views have them, over memory that has them the other way round.
    made = [torch.randn((num_blocks, BLOCK, 2, 6), generator=generator).transpose(1, 2) for _ in range(3)]
    assert not made[0].is_contiguous()
    return made


def a_transfer(pool: Any, caches: list[Any], num_blocks: int = 40, **options: Any) -> Any:
    from seer.config import TransferOptions
    from seer.engine.vllm.connector_transfer import BlockTransfer

    transfer = BlockTransfer(pool, TransferOptions(**options))
    transfer.use(caches, num_blocks)
    return transfer


def jobs(keys: list[bytes], blocks: list[int], *, is_async: bool = False) -> tuple[Any, Any]:
    from seer.engine.vllm.connector_plan import LoadJob, SaveJob

    return SaveJob("7", keys, blocks), LoadJob("b", keys, blocks, is_async)


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_are_loaded_with_the_bytes_they_were_saved_with(is_async: bool) -> None:
    pool, here, there = MemoryPool(), kv_memory(seed=1), kv_memory(seed=2)
    keys = [bytes([i]) * 32 for i in range(11)]
    # Buffers of two blocks: several parts on both ways.
    buffer_bytes = 8 * 2 * sum(layer[0].numel() * 4 for layer in here)
    sender = a_transfer(pool, here, buffer_bytes=buffer_bytes, save_wait_s=10.0)
    receiver = a_transfer(pool, there, buffer_bytes=buffer_bytes)
    source, target = list(range(5, 16)), list(range(30, 19, -1))
    sender.save([jobs(keys, source)[0]], ["7"])
    sender.settle()
    assert pool.freed == ["7"]
    receiver.load([jobs(keys, target, is_async=is_async)[1]])
    receiver.close()
    assert receiver.take_loaded() == ({"b"} if is_async else set())
    assert receiver.take_failed() == set()
    for mine, theirs in zip(here, there, strict=True):
        for a, b in zip(source, target, strict=True):
            assert torch.equal(mine[a], theirs[b])
    untouched = kv_memory(seed=2)
    assert all(torch.equal(there[layer][:20], untouched[layer][:20]) for layer in range(3))
    sender.close()


def test_a_block_of_the_scheduler_may_be_several_of_the_kernel() -> None:
    pool, memory = MemoryPool(), kv_memory()
    transfer = a_transfer(pool, memory, num_blocks=20)
    transfer.save([jobs([b"a" * 32], [3])[0]], [])
    transfer.settle()
    transfer.load([jobs([b"a" * 32], [9])[1]])
    assert all(torch.equal(layer[6:8], layer[18:20]) for layer in memory)
    transfer.close()
    with pytest.raises(ConfigError, match="does not hold 30 blocks"):
        a_transfer(pool, memory, num_blocks=30)


def test_a_block_that_is_missing_is_reported_once() -> None:
    pool, memory = MemoryPool(), kv_memory()
    transfer = a_transfer(pool, memory)
    keys = [b"a" * 32, b"b" * 32]
    transfer.save([jobs(keys[:1], [3])[0]], [])
    transfer.settle()
    transfer.load([jobs(keys, [8, 9])[1]])
    assert transfer.take_failed() == {9}
    assert transfer.take_failed() == set()
    assert torch.equal(memory[0][3], memory[0][8])
    transfer.close()


def test_saves_are_dropped_when_the_pool_is_too_slow() -> None:
    release = threading.Event()

    class SlowPool(MemoryPool):
        def put_now(self, keys: Any, buffers: Any, owners: Any = None) -> list[bool]:
            release.wait(30)
            return super().put_now(keys, buffers, owners)

    transfer = a_transfer(SlowPool(), kv_memory(), num_save_buffers=1, save_wait_s=0.0)
    transfer.save([jobs([b"a" * 32], [1])[0]], [])
    transfer.save([jobs([b"b" * 32], [2])[0]], [])
    assert transfer.counts()["dropped_blocks"] == 1
    assert transfer.take_stats() == {"seer_unsaved_blocks": 1}
    assert transfer.take_stats() == {}
    release.set()
    transfer.settle()
    assert transfer.counts()["saved_blocks"] == 1
    transfer.close()


def test_several_threads_write_a_buffer_at_once_and_it_is_used_again_when_all_are_done() -> None:
    """One thread is no match for a GPU that computes prompts: what it cannot save in time is computed again."""
    together = threading.Barrier(4, timeout=30)

    class OneByOne(MemoryPool):
        def put_now(self, keys: Any, buffers: Any, owners: Any = None) -> list[bool]:
            together.wait()
            assert len(keys) == len(owners) == len(buffers) == 2
            return super().put_now(keys, buffers, owners)

    pool, memory = OneByOne(), kv_memory()
    transfer = a_transfer(pool, memory, num_save_buffers=1, save_wait_s=30.0, save_threads=4)
    keys = [bytes([i]) * 32 for i in range(16)]
    transfer.save([jobs(keys[:8], list(range(8)))[0]], [])
    transfer.save([jobs(keys[8:], list(range(8, 16)))[0]], ["7"])
    transfer.settle()
    assert (transfer.counts()["saved_blocks"], pool.freed) == (16, ["7"])
    transfer.load([jobs(keys, list(range(20, 36)))[1]])
    assert all(torch.equal(layer[:16], layer[20:36]) for layer in memory)
    transfer.close()


def test_a_writer_that_fails_counts_as_an_error_and_gives_the_buffer_back() -> None:
    class Failing(MemoryPool):
        def put_now(self, keys: Any, buffers: Any, owners: Any = None) -> list[bool]:
            if keys[0] == b"b" * 32:
                raise OSError("no space left")
            return super().put_now(keys, buffers, owners)

    transfer = a_transfer(Failing(), kv_memory(), num_save_buffers=1, save_wait_s=30.0, save_threads=2)
    for _ in range(2):
        transfer.save([jobs([b"a" * 32, b"b" * 32], [1, 2])[0]], [])
        transfer.settle()
    assert transfer.counts()["save_errors"] == 2
    transfer.close()


def test_a_conversation_s_last_block_is_saved_and_loaded_though_it_is_not_full() -> None:
    """Eleven tokens were computed: two blocks of four and three tokens. Two were given since."""
    pool, plan = MemoryPool(), a_plan(MemoryPool())
    request = a_request("a", 12, prompt=5, has_turns=True)
    enter(plan, request, [10, 11, 12])
    request.num_computed_tokens = 11
    plan.finish(request, [10, 11, 12])
    jobs = step(plan).saves
    keys = dict(zip([key for job in jobs for key in job.keys], saved_of(jobs), strict=True))
    namespace = Namespace(model="m", weights_version=0, layout=LAYOUT, salt="")
    full = [key.tobytes() for key in block_keys(namespace, request.tokens[:11])]
    assert keys == {full[0]: 10, full[1]: 11, part_key(namespace, full, request.tokens[8:11]): 12}

    pool.blocks = dict.fromkeys(keys, b"")
    there, again = a_plan(pool), a_request("b", 14, prompt=5, has_turns=True, num_fresh=2)
    assert there.matched_tokens(again, 0) == (11, False)
    there.load_into(again, [20, 21, 22, 23], 11)
    (load,) = step(there, new=[("b", [20, 21, 22, 23])]).loads
    assert (load.keys, load.blocks) == (list(keys), [20, 21, 22])
    # The engine still has the full blocks: the part alone is loaded.
    here, again = a_plan(pool), a_request("c", 14, prompt=5, has_turns=True, num_fresh=2)
    assert here.matched_tokens(again, 8) == (3, False)
    here.load_into(again, [20, 21, 22, 23], 3)
    (load,) = step(here, new=[("c", [20, 21, 22, 23])]).loads
    assert (load.keys, load.blocks) == (list(keys)[2:], [22])


def test_parts_are_left_alone_without_turns_and_where_a_full_block_is_missing() -> None:
    pool, plan = MemoryPool(), a_plan(MemoryPool())
    request = a_request("a", 12, prompt=5)
    enter(plan, request, [10, 11, 12])
    request.num_computed_tokens = 11
    plan.finish(request, [10, 11, 12])
    assert saved(step(plan)) == [10, 11]

    namespace = Namespace(model="m", weights_version=0, layout=LAYOUT, salt="")
    again = a_request("b", 12, prompt=5, has_turns=True)
    first, second = (key.tobytes() for key in block_keys(namespace, again.tokens[:11]))
    pool.blocks = {first: b"", part_key(namespace, [first, second], again.tokens[8:11]): b""}
    assert a_plan(pool).matched_tokens(again, 0) == (4, False)


def saved_of(jobs: Any) -> list[int]:
    return [block for job in jobs for block in job.blocks]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_that_fails_gives_its_buffers_back(is_async: bool) -> None:
    """A device may be out of memory for a moment; the loads after that must not wait for buffers for ever."""

    class Full:
        """A layer that cannot be written to."""

        shape = (40, 96)

        def index_copy_(self, *_: Any) -> None:
            raise torch.OutOfMemoryError

    pool, memory = MemoryPool(), kv_memory()
    block_bytes = sum(layer[0].numel() * 4 for layer in memory)
    transfer = a_transfer(pool, memory, num_load_buffers=2, buffer_bytes=8 * block_bytes)
    keys, source, target = [bytes([i]) * 32 for i in range(5)], [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]
    transfer.save([jobs(keys, source)[0]], [])
    transfer.settle()
    layers, transfer._layers = transfer._layers, [Full()]
    for _ in range(2):
        with contextlib.nullcontext() if is_async else pytest.raises(torch.OutOfMemoryError):
            transfer.load([jobs(keys, target, is_async=is_async)[1]])
        transfer._loader.submit(lambda: None).result(30)  # the load before it has ended
    assert transfer.take_failed() == (set(target) if is_async else set())
    assert transfer._load_buffers.qsize() == 2
    transfer._layers = layers
    transfer.load([jobs(keys, target)[1]])
    assert all(torch.equal(layer[source], layer[target]) for layer in memory)
    transfer.close()
