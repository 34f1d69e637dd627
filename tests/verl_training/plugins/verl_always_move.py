# SPDX-License-Identifier: Apache-2.0
"""Has the driver move KV as if that were cheap, for tests only: computing the toy's again is in truth as fast.

Ray calls `always_move` when it starts a process: `runtime_env.worker_process_setup_hook`. The driver does not import
verl, so verl's external modules are not loaded there.
"""

from __future__ import annotations

from typing import Any

from verl_after_import import after_import


def _trust_given_costs(module: Any) -> None:
    """Those favour moving; measured ones do not replace them."""
    module.TransferEstimate._compare = lambda self: None


def always_move() -> None:
    """Change this process."""
    after_import({"seer.transfer": _trust_given_costs})
