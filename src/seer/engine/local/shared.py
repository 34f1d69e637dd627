"""Weights that several instances of one process use together. (Between processes: shared_matrices.py.)

Instances of one folder, type and device share one set of weights, so a second instance costs its KV memory
only. Sharing means that an update reaches all of them at once; it is therefore refused while any of them has
work, and asking a second instance for the same weights version finds it done.

Invariants
  1. All users of a set see the same weights version of it.
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
    """One set of weights and who uses it."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, matrices_dir: Path | None = None
    ) -> None:
        self.config, self.dtype, self.device, self._matrices_dir = config, dtype, device, matrices_dir
        self.weights_version: int | None = None
        self.fingerprint = ""
        self.tensors: decoder.ModelWeights | None = None
        self.lock = threading.Lock()
        self._users: weakref.WeakKeyDictionary[object, Callable[[], bool]] = weakref.WeakKeyDictionary()

    def join(self, user: object, busy: Callable[[], bool]) -> None:
        """Register a user; `busy` says whether it has work in hand."""
        self._users[user] = busy

    def load(
        self, source: Path | Mapping[str, torch.Tensor], weights_version: int, ops: Ops, user: object
    ) -> decoder.ModelWeights:
        """The weights of a weights version, read from `source` unless another user has done so."""
        with self.lock:
            if self.tensors is not None and self.weights_version == weights_version:
                return self.tensors
            for other, busy in list(self._users.items()):
                if other is not user and busy():
                    raise InstanceError(
                        f"weights version {weights_version} cannot be loaded: an instance that shares them runs chunks",
                        hint="let every instance finish or abort its chunks first",
                    )
            tensors = open_weights(source)
            loaded = decoder.load(self.config, self._make_linear(ops, tensors), tensors, self.dtype, self.device)
            self.fingerprint = fingerprint(tensors)
            self.weights_version = weights_version
            if self.tensors is None:
                self.tensors = loaded
            else:
                # In place, so that every user's model sees the new weights.
                self.tensors.replace(loaded)
            return self.tensors

    def _make_linear(self, ops: Ops, tensors: Mapping[str, torch.Tensor]) -> MakeLinear:
        """How to prepare these weights: matrices read from files may be there already, made by another process."""
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
    """The set for a folder, kernels, type and device; made on first use, dropped with its last user.

    `matrices_dir` is where its matrices are shared with other processes.
    """
    key = (folder.resolve(), type(ops), dtype, device)
    with _sets_lock:
        found = _sets.get(key)
        if found is None:
            found = _sets[key] = SharedWeights(config, dtype, device, matrices_dir)
        return found
