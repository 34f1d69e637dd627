# SPDX-License-Identifier: Apache-2.0
"""Where a chunk runs: the choice of an instance.

A scheduler says which request is next; this module says where it fits, by the books of `seer.fleet`.

The paper's rule: an instance is a candidate if it can hold the request's KV at the chunk's *end*. While the load is
balanced, take the candidate that already holds the longest prefix of the request; once the spread of in-flight
requests exceeds a threshold, take the least loaded. The paper pulls KV that the chosen instance lacks if it is more
than a margin of tokens, and computes it otherwise (`PlacementConfig.as_in_the_paper`). Without a margin, the faster of
the two by measured costs is chosen (seer.transfer). Both hold for the request's last instance too, which may have
dropped its KV while it waited.

Invariants
  1. Equal inputs give equal placements: ties break on instance id.
  2. A decision looks at few instances as long as few have room, or one of the least loaded has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from seer.buffer import Request
from seer.fleet import Fleet
from seer.transfer import Gap, TransferEstimate, plan_transfer

PAPER_IMBALANCE = 32
"""Spread of in-flight requests up to which the paper's placement counts as balanced."""
PAPER_PULL_MARGIN_TOKENS = 512
"""Missing tokens up to which the paper's placement computes KV again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """When cached KV decides, when load decides, and what moving KV costs."""

    imbalance_threshold: int = PAPER_IMBALANCE
    """Spread of in-flight requests up to which the longest cached prefix decides."""
    transfer: TransferEstimate | None = field(default_factory=TransferEstimate)
    """Costs of moving and of computing KV; None without a pool: missing KV is then always computed."""
    pull_margin_tokens: int | None = None
    """More missing tokens than this are pulled, fewer are computed; None: whichever is faster by `transfer`."""

    def as_in_the_paper(self) -> PlacementConfig:
        """The paper's threshold and margin, with the same pool."""
        return replace(self, imbalance_threshold=PAPER_IMBALANCE, pull_margin_tokens=PAPER_PULL_MARGIN_TOKENS)


class Place(msgspec.Struct, frozen=True, gc=False):
    """An instance for a chunk, and whether it loads the KV that it lacks from the pool."""

    instance: int
    load_kv: bool


def place(request: Request, chunk_tokens: int, fleet: Fleet, config: PlacementConfig) -> Place | None:
    """The instance for the request's next chunk, or None if no instance has the memory now."""
    num_tokens = request.num_tokens + chunk_tokens
    num_blocks = fleet.blocks(num_tokens)
    home = request.last_instance if request.last_instance is not None else fleet.prompt_home(request)
    instance: int | None
    if home is not None and fleet.spread <= config.imbalance_threshold and fleet.has_room(home, num_blocks, num_tokens):
        instance = home
    else:
        instance = fleet.least_loaded(num_blocks, num_tokens)
    if instance is None:
        return None
    return Place(instance, loads_kv(request, instance, fleet, config))


def loads_kv(request: Request, instance: int, fleet: Fleet, config: PlacementConfig) -> bool:
    """Whether the KV that the instance lacks is loaded from the pool rather than computed.

    An instance that had the KV of the request, or of its prompt, may have dropped it since. If it has not, it loads
    nothing. So all is priced as lacking, but for a prompt that another request uses there now. A request that has
    generated nothing has no KV in the pool. The KV of an instance that was removed is always loaded: it was saved for
    that before the instance left.
    """
    if config.transfer is None or not request.num_generated:
        return False
    if request.last_instance is not None and not fleet.alive(request.last_instance):
        return True
    if config.pull_margin_tokens is not None:
        held = request.group.num_prompt_tokens if fleet.prompt_home(request) == instance else 0
        return request.num_tokens - held > config.pull_margin_tokens
    held = request.group.num_prompt_tokens if fleet.holds_prompt(request, instance) else 0
    missing = request.num_tokens - held
    costs = config.transfer.costs
    gap = Gap(
        first_token=held,
        num_tokens=missing,
        num_pooled_tokens=max(0, missing - request.num_fresh),
        bytes_per_token=costs.bytes_per_token,
        # A turn ends anywhere, and instances may keep the last block of it that is not full.
        block_size=1 if request.group.has_turns else fleet.block_size,
        num_near_tokens=max(0, fleet.near_tokens(request, instance) - held),
    )
    return plan_transfer(gap, costs.move, costs.prefill, costs.near_move).move_tokens > 0
