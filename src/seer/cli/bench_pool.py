# SPDX-License-Identifier: Apache-2.0
"""`seer bench pool`: how fast is the KV pool on this machine, next to memory's own speed?

Writes in one process, reads in another, and prints what placement needs to decide between moving and
computing KV.
"""

from __future__ import annotations

import argparse
import functools

import msgspec
from rich.table import Table

from seer.cli.number_option import NumberOption
from seer.cli.size_option import size_option
from seer.cli.wide_console import wide_console
from seer.errors import ConfigError
from seer.kvpool.bench import PoolSpeed, Spread, fresh_name, measure_pool
from seer.kvpool.local import LocalPool
from seer.kvpool.local_files import LocalPoolConfig
from seer.kvpool.mooncake import MooncakePool, MooncakePoolConfig
from seer.kvpool.mooncake_servers import MooncakeServers, MooncakeServersConfig
from seer.machine.sizes import show_size
from seer.ranges import Repeats, SequenceSlots

EXAMPLES = """\
examples:
  seer bench pool
  seer bench pool --block 256KiB 1MiB --rounds 10
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "pool",
        help="measure the KV pool beside the speed of plain memory copies",
        description="Save and load blocks through the KV pool of this machine, and print GB/s beside a plain copy.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--backend", choices=["local", "mooncake"], default="local", help="kind of pool (%(default)s)")
    parser.add_argument(
        "--block",
        metavar="SIZE",
        type=size_option,
        nargs="+",
        default=[256 << 10, 1 << 20, 4 << 20],
        help="block sizes (256KiB 1MiB 4MiB)",
    )
    parser.add_argument("--round", metavar="SIZE", type=size_option, default=256 << 20, help="bytes per round (256MiB)")
    parser.add_argument(
        "--rounds", metavar="N", type=NumberOption(Repeats), default=5, help="rounds per block size (%(default)s)"
    )
    parser.add_argument(
        "--batch", metavar="N", type=NumberOption(SequenceSlots), default=16, help="blocks per call (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per block size on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure each block size and print a row for it."""
    largest = max(args.block)
    call_bytes = args.batch * largest
    if args.round < call_bytes:
        raise ConfigError(
            f"--round {show_size(args.round)} is less than one call, {args.batch} blocks of {show_size(largest)}",
            hint=f"--round {call_bytes}, or a smaller --batch or --block",
        )
    measure = measure_local if args.backend == "local" else measure_mooncake
    table = Table("block", "memcpy", "put", "get", "put/memcpy", "get/memcpy", "lookup of 256")
    for block_bytes in args.block:
        speed = measure(block_bytes, args.round, args.batch, args.rounds)
        if args.json:
            print(msgspec.json.encode(speed).decode())
        else:
            table.add_row(*_row(speed))
    if not args.json:
        wide_console(160, soft_wrap=True).print(table)
    return 0


def measure_local(block_bytes: int, round_bytes: int, batch_blocks: int, num_rounds: int) -> PoolSpeed:
    """Measure a local pool made for the purpose."""
    config = LocalPoolConfig(
        name=fresh_name(),
        block_bytes=block_bytes,
        dram_bytes=round_bytes + max(round_bytes // 4, 64 * block_bytes),
    )
    with LocalPool(config) as pool:  # keeps the files in place while the two sides come and go
        try:
            return measure_pool(
                functools.partial(LocalPool, config),
                block_bytes=block_bytes,
                round_bytes=round_bytes,
                batch_blocks=batch_blocks,
                num_rounds=num_rounds,
            )
        finally:
            pool.close(remove=True)


def measure_mooncake(block_bytes: int, round_bytes: int, batch_blocks: int, num_rounds: int) -> PoolSpeed:
    """Measure a Mooncake store started for the purpose, attached to through shared memory."""
    # Mooncake evicts from 90% on and keeps what was read for a lease: leave it room for two rounds.
    with MooncakeServers(MooncakeServersConfig(dram_bytes=3 * round_bytes)) as servers:
        config = MooncakePoolConfig(
            owner_address=servers.owner_address,
            block_bytes=block_bytes,
            staging_blocks=2 * batch_blocks,
            deadline_s=30.0,
        )
        return measure_pool(
            functools.partial(MooncakePool, config),
            block_bytes=block_bytes,
            round_bytes=round_bytes,
            batch_blocks=batch_blocks,
            num_rounds=num_rounds,
        )


def _row(speed: PoolSpeed) -> list[str]:
    def rate(spread: Spread) -> str:
        return f"{show_size(spread.median)}/s"

    def ratio(spread: Spread) -> str:
        return f"{spread.median:.2f} ({spread.least:.2f}..{spread.most:.2f})"

    return [
        show_size(speed.block_bytes),
        rate(speed.memcpy_bytes_s),
        rate(speed.put_bytes_s),
        rate(speed.get_bytes_s),
        ratio(speed.put_to_memcpy),
        ratio(speed.get_to_memcpy),
        f"{speed.lookup_s.median * 1e6:.0f} us",
    ]
