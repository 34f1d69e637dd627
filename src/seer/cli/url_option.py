# SPDX-License-Identifier: Apache-2.0
"""Addresses of HTTP servers on the command line."""

import argparse
from urllib.parse import urlsplit

_LONGEST = 2048


def url_option(text: str) -> str:
    """For `add_argument(type=...)`: `http://HOST:PORT`, refused the way argparse reports bad values."""
    shown = repr(text if len(text) <= 60 else f"{text[:57]}...")
    try:
        parts = urlsplit(text)
        port, host = parts.port, (parts.hostname or "").encode("idna")
    except ValueError as error:  # also of a name that no host can have
        raise argparse.ArgumentTypeError(f"{shown} is no address: {error}; write http://HOST:PORT") from None
    if "@" in parts.netloc:
        raise argparse.ArgumentTypeError("an address holds no name and no password: others see command lines")
    is_plain = text.isprintable() and " " not in text and len(text) <= _LONGEST  # urlsplit drops line ends
    if parts.scheme not in ("http", "https") or not host or port == 0 or not is_plain:
        raise argparse.ArgumentTypeError(f"{shown} is no address; write http://HOST:PORT")
    return text
