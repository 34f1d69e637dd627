# SPDX-License-Identifier: Apache-2.0
"""Instances on other machines: how a process there reaches its driver, and how each proves itself to the other.

    driver                                       the instance's process, anywhere
    Listener.expect() ──> Dial ──(by Ray, or by hand)──> connect(Dial)
       accept, TLS, handshake  <──────── TCP ────────  dial, TLS, handshake
       Channel                 <──────── frames ──────  Channel: from here on as on one machine (channel.py)

`seer.hosting.serving.serve_instance` is the whole end of the instance; it runs in any process that has an event loop.
"""
