# SPDX-License-Identifier: Apache-2.0
"""Weights that the instances of one process share. (Between processes: shared_matrices.py.)

Instances of the same folder, kernels, dtype and device share one set of weights, so a second instance costs only its KV
memory. An update changes the weights of all of them at once. It is therefore refused while another instance has work.
The next instance that is updated to the same weights version finds it loaded.

Invariants
  1. All users of a set see the same weights version of it.
  2. No user starts work from the moment at which none had any until the new weights are loaded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from seer.engine.local import model as decoder
from seer.engine.local.cpu_ops import CpuOps
from seer.engine.local.model_config import ModelConfig
from seer.engine.local.ops import MakeLinear, Ops
from seer.engine.local.shared_matrices import SharedMatrices
from seer.engine.local.weights import TensorFiles, fingerprint, open_weights
from seer.errors import InstanceError


class SharedWeights:
    """One set of weights and its users."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, matrices_dir: Path | None = None
    ) -> None:
        self.config, self.dtype, self.device, self._matrices_dir = config, dtype, device, matrices_dir
        self.weights_version: int | None = None
        """The only one under which users may start work; while it is loaded too."""
        self.starting = threading.Lock()
        """Held while a user compares its version and starts work, and while a new version is announced."""
        self.fingerprint = ""
        self.tensors: decoder.ModelWeights | None = None
        self.lock = threading.Lock()
        self._users: weakref.WeakKeyDictionary[object, Callable[[], bool]] = weakref.WeakKeyDictionary()

    def join(self, user: object, busy: Callable[[], bool]) -> None:
        """Register a user; `busy` says whether it has work."""
        self._users[user] = busy

    def load(
        self, source: Path | Mapping[str, torch.Tensor], weights_version: int, ops: Ops, user: object
    ) -> decoder.ModelWeights:
        """The weights of this version, read from `source` unless another user has loaded them."""
        with self.lock:
            if self.tensors is not None and self.weights_version == weights_version:
                return self.tensors
            before = self.weights_version
            with self.starting:
                self._refuse_while_busy(weights_version, user)
                self.weights_version = weights_version
            try:
                tensors = open_weights(source)
                loaded = decoder.load(self.config, self._make_linear(ops, tensors), tensors, self.dtype, self.device)
                self.fingerprint = fingerprint(tensors)
            except BaseException:
                self.weights_version = before
                raise
            if self.tensors is None:
                self.tensors = loaded
            else:
                # In place, so that every user's model sees the new weights.
                self.tensors.replace(loaded)
            return self.tensors

    def _refuse_while_busy(self, weights_version: int, user: object) -> None:
        for other, busy in list(self._users.items()):
            if other is not user and busy():
                raise InstanceError(
                    f"weights version {weights_version} cannot be loaded: an instance that shares the weights "
                    "has chunks in flight",
                    hint="wait for the chunks of every instance, or abort them",
                )

    def _make_linear(self, ops: Ops, tensors: Mapping[str, torch.Tensor]) -> MakeLinear:
        """How to prepare these weights: packed matrices of files may exist already, made by another process."""
        if isinstance(ops, CpuOps) and self._matrices_dir is not None and isinstance(tensors, TensorFiles):
            return SharedMatrices(self._matrices_dir, tensors.paths).linear
        return ops.linear


_sets: weakref.WeakValueDictionary[tuple[object, ...], SharedWeights] = weakref.WeakValueDictionary()
_sets_lock = threading.Lock()


def shared_weights(
    folder: Path,
    config: ModelConfig,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    *,
    matrices_dir: Path | None = None,
) -> SharedWeights:
    """The set for a folder, kernels, dtype and device; made on first use, freed with its last user.

    In `matrices_dir` its matrices are shared with other processes.
    """
    key = (folder.resolve(), type(ops), dtype, device)
    with _sets_lock:
        found = _sets.get(key)
        if found is None:
            found = _sets[key] = SharedWeights(config, dtype, device, matrices_dir)
        return found
