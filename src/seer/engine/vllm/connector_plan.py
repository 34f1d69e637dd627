# SPDX-License-Identifier: Apache-2.0
"""Which KV blocks move, decided in the scheduler's process.

A block may be saved when it is final: all its tokens are accepted, and their KV has been computed or is being computed
by a step that was launched before. Final blocks are pending until `flush_blocks` of them wait, `flush_steps` steps
have passed, or their request leaves.

    request enters      -> keys of its context are looked up in the pool and pinned for it
    a block is full     -> pending            (checked when it can be full, not at every step)
    enough are pending  -> saved with this step
    the chunk ends      -> the rest is saved with the next step, before anything can overwrite it; of a conversation the
                           last block too, though it is not full, under a key of its own (`part_key`)
    the request is done -> freed in the pool

Invariants
  1. A saved block holds accepted tokens only, never those of a draft.
  2. A pending block is dropped when its request loses it (preemption) before it is read.
  3. Every key is made from the request's own weights and weights version, so a step under new weights cannot save under
     old keys.
"""

from __future__ import annotations

import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from seer.config import TransferOptions
from seer.engine.vllm.chunk_facts import read_facts
from seer.engine.vllm.connector_parts import WholeBlocks
from seer.kvpool.base import part_owner
from seer.kvpool.keys import HASH_BYTES, KVLayout, Namespace, chain_hash, key_prefix, namespace_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

NEAR_BLOCKS = 2
"""A context of which only so many last blocks are missing was saved a moment ago by another instance, whose last save
is still under way: worth a short wait."""


@dataclass(slots=True)
class SaveJob:
    """Blocks of one request to save to the pool."""

    request: str
    keys: list[bytes]
    """Of part 0; each worker makes those of its own part."""
    blocks: list[int]


@dataclass(slots=True)
class LoadJob:
    """Blocks of one request to load from the pool."""

    request_id: str
    """vLLM's name for it."""
    keys: list[bytes]
    blocks: list[int]
    is_async: bool


@dataclass
class PoolMetadata(KVConnectorMetadata):
    """What a worker moves in one step."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)


def pool_salt(vllm_config: VllmConfig) -> str:
    """What the bytes of blocks depend on, beside their layout."""
    return f"vllm/{vllm.__version__}/{current_platform.device_type}/{vllm_config.cache_config.cache_dtype}"


@dataclass(slots=True)
class _Tracked:
    """A request, and which of its blocks are saved or pending."""

    request: Request
    name: str
    prefix: bytes
    """The namespace, which starts every key."""
    parent: bytes
    """Hash of the blocks so far."""
    num_prompt_tokens: int
    max_left: int
    may_load: bool
    has_turns: bool
    num_fresh: int
    """The last tokens of its context, whose KV was never computed."""
    root: bytes = b""
    """Parent hash of its first block."""
    keys: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    part: bytes | None = None
    """Key of the part that is to be loaded after full blocks; freed once the request runs."""
    num_planned: int = 0
    """Leading blocks that are in the pool, being saved, or pending."""
    num_sent: int = 0
    """Leading blocks that are in the pool or being saved; those from here to `num_planned` are pending."""
    first_loaded: int = 0
    is_loading: bool = False
    asked_s: float | None = None
    looked_s: float = 0.0


class Plan:
    """The plan of one engine."""

    def __init__(
        self, pool: WholeBlocks, layout: KVLayout, salt: str, *, tokens_per_step: int, options: TransferOptions
    ) -> None:
        self._pool = pool
        self._layout, self._salt = layout, salt
        self._tokens_per_step = tokens_per_step
        self._options = options
        self._block_size = self._layout.block_size
        self._tracked: dict[str, _Tracked] = {}
        self._pack = struct.Struct(f"<{self._block_size}I").pack
        self._namespaces: dict[tuple[str, int], tuple[bytes, bytes]] = {}
        self._step = 0
        self._due: defaultdict[int, list[_Tracked]] = defaultdict(list)
        self._pending: list[_Tracked] = []
        self._num_pending = 0
        self._pending_since = 0
        self._next = PoolMetadata()

    # A request enters

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Tokens the pool has after the computed ones; None makes vLLM ask again at a later step."""
        tracked = self._track(request)
        if tracked is None or not tracked.may_load:
            return 0, False
        self._hash(tracked)
        first = num_computed // self._block_size
        wanted = tracked.keys[first : (request.num_tokens - 1) // self._block_size]
        is_continued = request.num_tokens > tracked.num_prompt_tokens
        num_known_tokens = request.num_tokens - 1 - tracked.num_fresh
        tracked.part = self._part_key(tracked, num_known_tokens) if is_continued else None
        if not wanted and tracked.part is None:
            return 0, False
        now_s = time.monotonic()
        if tracked.asked_s is not None and now_s - tracked.looked_s < self._options.ask_again_s:
            return None, False
        held = self._pool.lookup_now(wanted) if wanted else 0
        num_known = num_known_tokens // self._block_size - first
        if is_continued and 0 < num_known - held <= NEAR_BLOCKS:
            tracked.asked_s = now_s if tracked.asked_s is None else tracked.asked_s
            tracked.looked_s = now_s
            if now_s - tracked.asked_s < self._options.near_deadline_s:
                return None, False
        tracked.asked_s = None
        tracked.first_loaded = first
        has_part = tracked.part is not None and held == num_known and self._pool.lookup_now([tracked.part]) == 1
        found = held * self._block_size + (num_known_tokens % self._block_size if has_part else 0)
        return found, found > 0 and self._options.load_async

    def load_into(self, request: Request, blocks: Sequence[int], num_tokens: int) -> None:
        """Plan a load: `blocks` are all the request's blocks, and the loaded ones follow its computed ones."""
        tracked = self._tracked[request.request_id]
        end = tracked.first_loaded + num_tokens // self._block_size
        keys, into = tracked.keys[tracked.first_loaded : end], list(blocks[tracked.first_loaded : end])
        if num_tokens % self._block_size:
            assert tracked.part is not None, f"{num_tokens} tokens of {request.request_id} are no full blocks"
            keys, into = [*keys, tracked.part], [*into, blocks[end]]
        tracked.is_loading = self._options.load_async
        self._next.loads.append(LoadJob(request.request_id, keys, into, self._options.load_async))

    # Every step

    def step(self, output: SchedulerOutput) -> PoolMetadata:
        """Note what was scheduled, and return what moves with this step."""
        self._step += 1
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                self._enter(tracked, new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for index, blocks in enumerate(cached.new_block_ids):
            if blocks:
                self._grow(cached.req_ids[index], blocks[0], is_resumed=cached.req_ids[index] in cached.resumed_req_ids)
        for tracked in self._due.pop(self._step, ()):
            self._check_blocks(tracked)
        waited = self._step - self._pending_since
        if self._num_pending >= self._options.flush_blocks or (
            self._num_pending and waited >= self._options.flush_steps
        ):
            self._flush()
        now, self._next = self._next, PoolMetadata()
        return now

    def _enter(self, tracked: _Tracked, blocks: Sequence[int]) -> None:
        tracked.blocks, tracked.is_loading = list(blocks), False
        self._hash(tracked)
        full = tracked.keys[: tracked.request.num_tokens // self._block_size]
        tracked.num_planned = tracked.num_sent = self._pool.pin(tracked.name, full) if full else 0
        self._due[self._step + 1].append(tracked)

    def _grow(self, request_id: str, blocks: Sequence[int], *, is_resumed: bool) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if is_resumed:  # it was preempted, so all its blocks are new
            tracked.blocks = list(blocks)
            self._drop_pending(tracked)
            self._due[self._step + 1].append(tracked)
        else:
            tracked.blocks.extend(blocks)

    def _check_blocks(self, tracked: _Tracked) -> None:
        """Find blocks that became final, and schedule the next check for when another one can be."""
        request = tracked.request
        if request.status != RequestStatus.RUNNING:
            return  # finished, or preempted: then `_grow` tracks it again
        if tracked.part is not None:  # it was loaded with an earlier step, and the request goes on
            self._next.frees.append(part_owner(tracked.name))
            tracked.part = None
        # Tokens after the known ones are drafts, or still being sampled.
        final = min(request.num_computed_tokens, request.num_tokens)
        full = final // self._block_size
        if full > tracked.num_planned:
            if tracked.num_planned == tracked.num_sent:
                self._pending.append(tracked)
            if not self._num_pending:
                self._pending_since = self._step
            self._num_pending += full - tracked.num_planned
            tracked.num_planned = full
        if final < request.num_tokens - 1 - self._tokens_per_step:
            wait = 1  # still computing its context, many tokens at a time
        else:
            wait = max(1, -(-((full + 1) * self._block_size - final) // self._tokens_per_step))
        self._due[self._step + wait].append(tracked)

    def _flush(self) -> None:
        pending, self._pending, self._num_pending = self._pending, [], 0
        for tracked in pending:
            if tracked.request.status == RequestStatus.RUNNING:
                self._save(tracked, tracked.num_planned, tracked.blocks)
            else:
                self._drop_pending(tracked)

    def _save(self, tracked: _Tracked, upto: int, blocks: Sequence[int]) -> None:
        span = slice(tracked.num_sent, upto)
        if span.start < upto:
            self._hash(tracked)
            self._next.saves.append(SaveJob(tracked.name, tracked.keys[span], list(blocks[span])))
        tracked.num_sent = tracked.num_planned = max(upto, tracked.num_sent)

    def _drop_pending(self, tracked: _Tracked) -> None:
        if tracked in self._pending:
            self._pending.remove(tracked)
            self._num_pending -= tracked.num_planned - tracked.num_sent
        tracked.num_planned = tracked.num_sent

    # A request leaves

    def finish(self, request: Request, blocks: Sequence[int]) -> None:
        """A chunk ended: save the rest of it with the next step, or free all of it."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._drop_pending(tracked)
        is_over = request.status == RequestStatus.FINISHED_STOPPED or request.num_output_tokens >= tracked.max_left
        if is_over and not tracked.has_turns:
            self._next.frees.append(tracked.name)
        elif not tracked.is_loading and tracked.blocks:
            # The last token's KV has not been computed, or belongs to a rejected draft.
            num_final = min(request.num_computed_tokens, request.num_tokens - 1)
            full = num_final // self._block_size
            self._save(tracked, min(full, len(blocks)), blocks)
            part = self._part_key(tracked, num_final)
            if part is not None and full < len(blocks):
                self._next.saves.append(SaveJob(part_owner(tracked.name), [part], [blocks[full]]))

    def forget_blocks(self, blocks: set[int]) -> None:
        """These blocks could not be loaded: the pool no longer has them."""
        for tracked in self._tracked.values():
            lost = next((at for at, block in enumerate(tracked.blocks) if block in blocks), None)
            if lost is not None and lost < tracked.num_sent:
                self._drop_pending(tracked)
                tracked.num_planned = tracked.num_sent = lost

    def take_versions(self) -> set[int]:
        """Weights versions of all requests since the last call; requests that are still here keep their keys."""
        versions = {weights_version for _, weights_version in self._namespaces}
        self._namespaces.clear()
        return versions

    # Keys

    def _track(self, request: Request) -> _Tracked | None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            facts = read_facts(request.sampling_params, request.num_tokens, name=request.request_id)
            if facts is None:
                return None  # not a chunk of ours: a warm-up request, or one of a stranger
            tracked = self._tracked[request.request_id] = _Tracked(
                request,
                str(facts.request),
                *self._namespace(facts.model, facts.weights_version),
                facts.num_prompt_tokens,
                facts.max_left,
                facts.load,
                facts.has_turns,
                facts.num_fresh,
            )
            tracked.root = tracked.parent
        return tracked

    def _hash(self, tracked: _Tracked) -> None:
        """Make the keys of full blocks, equal to those of `seer.kvpool.keys.KeyChain`; cheaper for one block at a
        time.
        """
        tokens = self._block_size
        request, keys = tracked.request, tracked.keys
        while (len(keys) + 1) * tokens <= request.num_tokens:
            start = len(keys) * tokens
            block = self._pack(*request.all_token_ids[start : start + tokens])
            tracked.parent = chain_hash(tracked.parent, block)
            keys.append(tracked.prefix + tracked.parent)

    def _part_key(self, tracked: _Tracked, num_tokens: int) -> bytes | None:
        """The key of a conversation's last block after so many tokens, as `seer.kvpool.keys.part_key` makes it; None if
        that block is full.
        """
        full, rest = divmod(num_tokens, self._block_size)
        if not rest or not tracked.has_turns:
            return None
        self._hash(tracked)
        parent = tracked.keys[full - 1][-HASH_BYTES:] if full else tracked.root
        tokens = tracked.request.all_token_ids[full * self._block_size : num_tokens]
        return tracked.prefix + chain_hash(parent, struct.pack(f"<{rest}I", *tokens))

    def _namespace(self, model: str, weights_version: int) -> tuple[bytes, bytes]:
        """The prefix of the keys, and the parent hash of first blocks."""
        found = self._namespaces.get((model, weights_version))
        if found is None:
            namespace = Namespace(model=model, weights_version=weights_version, layout=self._layout, salt=self._salt)
            found = self._namespaces[model, weights_version] = key_prefix(namespace), namespace_digest(namespace)
        return found
