# SPDX-License-Identifier: Apache-2.0
"""The certificate of a fleet's driver: made when the fleet starts, trusted by its instances alone, never kept.

Python cannot make one. The `openssl` command can, and is on nearly every Linux machine, because the package with the
certificate authorities needs it. The key comes through a pipe and is in no file that has a name.
"""

from __future__ import annotations

import os
import ssl
import subprocess
from typing import NamedTuple

from seer.errors import ConfigError

_DEADLINE_S = 30.0
"""It takes milliseconds."""
_COMMAND = [
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", "3650", "-subj", "/CN=seer-driver", "-keyout", "-", "-out", "-"),
]


class OwnCertificate(NamedTuple):
    """What the driver listens with, and what its instances must know."""

    context: ssl.SSLContext
    pem: str
    """The certificate without its key."""


def make_certificate() -> OwnCertificate:
    """A new key and a certificate for it."""
    try:
        made = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_DEADLINE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"no certificate can be made for connections between machines: {error}",
            hint="install openssl (the command) on the driver's machine",
        ) from None
    begin = made.index("-----BEGIN CERTIFICATE-----")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, made)
    return OwnCertificate(context, made[begin:])


def _load(context: ssl.SSLContext, pem: str) -> None:
    """`load_cert_chain` wants a file: one in memory, without a name."""
    descriptor = os.memfd_create("seer-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
