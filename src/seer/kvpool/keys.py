# SPDX-License-Identifier: Apache-2.0
"""Name a block of KV by everything its bytes depend on.

A key is 32 bytes: the weights version (8, little endian), a digest of the namespace (8), and the content (16).
The content is a chained hash of the token ids, so a key names the whole prefix up to its block and not the
block's own tokens alone. The pool drops a weights version by the first 8 bytes; only backends read that part.

Pure: stdlib hashlib and numpy, no clock, no I/O, no dependence on PYTHONHASHSEED; every process on every
machine builds the same keys. The local engine's own prefix cache uses `chain_hash` too, so a block has one
name everywhere.

Invariants
  1. Two namespaces that differ in model, weights version, layout or salt share no key: the namespace seeds the chain as
     well as standing in the key, so a reader with another weights version or layout can never hit.
  2. Key i depends on every token of blocks 0..i and on nothing after them.
  3. A `KeyChain` names full blocks only. The last block of a sequence that stops in its middle has a key by `part_key`;
     it names the tokens of that part, so it is the key of no full block and of no other part.
  4. The parts of a block that different tensor-parallel ranks hold have different keys, made from one (`keys_of_part`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from seer.errors import ConfigError

KEY_BYTES = 32
HASH_BYTES = 16
"""128 bits: two prefixes do not collide by chance."""
_FORMAT = b"seer-kv-2"  # part of every digest: a change of this file's rules must change every key

KeyArray: TypeAlias = NDArray[np.uint8]
"""Keys as one contiguous array of shape [n, 32]; what every backend works on."""
Keys: TypeAlias = "KeyArray | Sequence[bytes]"
Tokens: TypeAlias = "Sequence[int] | NDArray[Any]"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """How KV bytes are laid out in a block; two engines may share blocks only when these agree."""

    num_layers: int
    """Layers whose KV is in the block (those of this pipeline rank)."""

    num_kv_heads: int
    """KV heads in the block (those of this tensor-parallel rank); 1 for MLA."""

    head_dim: int
    """Values per head and token; the latent plus rope size for MLA."""

    dtype: str
    """Name of the element type: bfloat16, float16, float32, float8_e4m3."""

    block_size: int
    """Tokens per block."""

    kind: str = "kv"
    """`kv` when keys and values are stored apart, `latent` when one latent stands for both (MLA)."""

    num_ranks: int = 1
    """How many tensor-parallel ranks the model is spread over."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_ranks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"layout.{name}={getattr(self, name)} must be at least 1")
        if self.kind not in ("kv", "latent"):
            raise ConfigError(f"layout.kind={self.kind!r} is neither 'kv' nor 'latent'")

    def block_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one block, given the size of its element type."""
        halves = 2 if self.kind == "kv" else 1
        return halves * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size * dtype_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """Everything but the tokens that decides the bytes of a block."""

    model: str
    """Identity of the model: a name or path, plus what distinguishes two checkpoints of it."""

    weights_version: int
    """Version of the weights."""

    layout: KVLayout

    salt: str = ""
    """What else changes KV for equal tokens: an adapter, image features, rope scaling."""

    def __post_init__(self) -> None:
        if not 0 <= self.weights_version < 2**64:
            raise ConfigError(f"weights_version={self.weights_version} must fit in 64 unsigned bits")


@functools.lru_cache(maxsize=16)
def namespace_digest(namespace: Namespace) -> bytes:
    """The 16-byte digest of a namespace; it is also the parent of every first block."""
    layout = dataclasses.astuple(namespace.layout)
    parts = [namespace.model, str(namespace.weights_version), namespace.salt, *map(str, layout)]
    digest = hashlib.blake2b(_FORMAT, digest_size=HASH_BYTES)
    for part in parts:  # length-prefixed, so no two lists of parts give the same bytes
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def key_prefix(namespace: Namespace) -> bytes:
    """The first 16 bytes of every key of this namespace: weights version, then half of the namespace digest."""
    return namespace.weights_version.to_bytes(8, "little") + namespace_digest(namespace)[:8]


def keys_of_part(keys: Sequence[bytes], part: int) -> Sequence[bytes]:
    """The keys of one part of each block, where the ranks of a model hold different parts; part 0 has `keys` itself.

    The part goes into the namespace half of a key, so one chain of hashes serves all ranks.
    """
    if not part:
        return keys
    return [key[:8] + (int.from_bytes(key[8:16], "little") ^ part).to_bytes(8, "little") + key[16:] for key in keys]


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of one block: `parent` is the hash before it, `tokens` its ids as little-endian uint32."""
    return hashlib.blake2b(tokens, digest_size=HASH_BYTES, key=parent).digest()


def token_bytes(token_ids: Tokens) -> bytes:
    """Token ids in the one form that is hashed; refuses ids that do not fit."""
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return b""
    if ids.dtype.kind not in "iu":
        raise TypeError(f"token ids must be integers, got {ids.dtype}")
    if int(ids.min()) < 0 or int(ids.max()) >= 2**32:
        raise ValueError(f"token ids must fit in 32 unsigned bits, got {int(ids.min())}..{int(ids.max())}")
    return ids.astype("<u4", copy=False).tobytes()


class KeyChain:
    """The keys of one growing sequence: feed it tokens, it returns the keys of the blocks they completed."""

    __slots__ = ("_block_token_bytes", "_hash", "_prefix", "_rest", "block_size", "num_blocks")

    def __init__(self, namespace: Namespace, block_size: int | None = None) -> None:
        self.block_size = _block_size(namespace, block_size)
        self._block_token_bytes = 4 * self.block_size
        self._prefix = key_prefix(namespace)
        self._hash = namespace_digest(namespace)
        self._rest = b""
        self.num_blocks = 0
        """Blocks completed so far."""

    def extend(self, token_ids: Tokens) -> KeyArray:
        """Append tokens; return keys [n, 32] of the blocks that became full, oldest first."""
        data = self._rest + token_bytes(token_ids)
        size = self._block_token_bytes
        num_new = len(data) // size
        keys = bytearray()
        for start in range(0, num_new * size, size):
            self._hash = chain_hash(self._hash, data[start : start + size])
            keys += self._prefix
            keys += self._hash
        self._rest = data[num_new * size :]
        self.num_blocks += num_new
        return np.frombuffer(keys, np.uint8).reshape(num_new, KEY_BYTES)


def block_keys(namespace: Namespace, token_ids: Tokens, block_size: int | None = None) -> KeyArray:
    """Keys [n, 32] of the full blocks of a sequence; `block_size` may only repeat the layout's own."""
    return KeyChain(namespace, block_size).extend(token_ids)


def part_key(namespace: Namespace, keys: Sequence[bytes], token_ids: Tokens) -> bytes:
    """The key of a block that is not full: `keys` name the blocks before it, `token_ids` are the tokens in it."""
    parent = keys[-1][-HASH_BYTES:] if keys else namespace_digest(namespace)
    return key_prefix(namespace) + chain_hash(parent, token_bytes(token_ids))


def as_key_array(keys: Keys) -> KeyArray:
    """Any accepted form of keys as one contiguous uint8 array [n, 32]; copies only if it must."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise TypeError(f"keys must be uint8 [n, {KEY_BYTES}], got {keys.dtype} {list(keys.shape)}")
        return np.ascontiguousarray(keys)
    for key in keys:
        if len(key) != KEY_BYTES:
            raise TypeError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)


def _block_size(namespace: Namespace, block_size: int | None) -> int:
    layout_tokens = namespace.layout.block_size
    if block_size is not None and block_size != layout_tokens:
        raise ConfigError(
            f"block_size={block_size} differs from layout.block_size={layout_tokens}",
            hint="the layout is part of every key; make a namespace with the block size you use",
        )
    return layout_tokens
