# SPDX-License-Identifier: Apache-2.0
"""What a Mooncake store holds, tier by tier, from the master's Prometheus page.

Numbers that the page lacks are 0, and a page that does not parse is no answer: another version of Mooncake may name
them differently, and they are only shown to people.
"""

from __future__ import annotations

import http.client

import msgspec

from seer.errors import MissingExtra

_NAMES = {
    "master_key_count": "num_blocks",
    "master_allocated_bytes": "dram_bytes",
    "master_total_capacity_bytes": "dram_capacity_bytes",
    "master_allocated_file_size_bytes": "ssd_bytes",
}
"""Mooncake 0.3.13's names, and ours."""


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


def parse_tiers(text: str) -> MooncakeTiers | None:
    """The numbers of a metrics page, None when it is not Prometheus text."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise MissingExtra("prometheus_client", "mooncake") from None

    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        values = {sample.name: int(sample.value) for sample in samples if sample.name in _NAMES}
    except (ValueError, LookupError, OverflowError):  # not this format, or NaN or infinity as a number of bytes
        return None
    return MooncakeTiers(**{_NAMES[name]: value for name, value in values.items()})
