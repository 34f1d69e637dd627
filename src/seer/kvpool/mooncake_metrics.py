"""What a Mooncake master says it holds, tier by tier, read from its metrics page.

The page is Prometheus text. Numbers that are missing are 0: another version may name them otherwise, and
nothing but what people are shown depends on them.
"""

from __future__ import annotations

import http.client

import msgspec

_DRAM = "master_allocated_bytes"
_DRAM_CAPACITY = "master_total_capacity_bytes"
_SSD = "master_allocated_file_size_bytes"
_BLOCKS = "master_key_count"


class MooncakeTiers(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole store holds now."""

    num_blocks: int = 0
    dram_bytes: int = 0
    dram_capacity_bytes: int = 0
    ssd_bytes: int = 0


def read_tiers(address: str, timeout_s: float) -> MooncakeTiers | None:
    """Ask the master at host:port; None when it does not answer in time."""
    host, port = address.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return parse_tiers(text)


def parse_tiers(text: str) -> MooncakeTiers:
    """The numbers of a metrics page."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in (_DRAM, _DRAM_CAPACITY, _SSD, _BLOCKS):
            values[name] = int(float(value))
    return MooncakeTiers(
        num_blocks=values.get(_BLOCKS, 0),
        dram_bytes=values.get(_DRAM, 0),
        dram_capacity_bytes=values.get(_DRAM_CAPACITY, 0),
        ssd_bytes=values.get(_SSD, 0),
    )
