# SPDX-License-Identifier: Apache-2.0
"""Make a configuration from plain values: of a file, of the command line, or of keyword arguments.

Values are laid over a base, field by field and section by section, so that a preset, a file and the command line can
follow one another. An unknown key is refused with the nearest known one; a value of the wrong type with its key.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from seer.config.engines import ENGINE_CONFIGS, ENGINES
from seer.config.keywords import SHORT_NAMES, InstanceKeywords
from seer.config.nearest import nearest
from seer.config.rollout import RolloutConfig
from seer.config.run import RunConfig
from seer.errors import ConfigError
from seer.machine.gpus import parse_gpus
from seer.machine.sizes import parse_size
from seer.ranges import check, check_path

C = TypeVar("C")
Values = Mapping[str, Any]


def build(kind: type[C], values: Values, *, base: C | None = None, where: str = "", source: str = "") -> C:
    """A `kind` with these values; those that are not given come from `base`, or are the defaults.

    `where` is the key of this section and `source` the file, for messages.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    known = [field.name for field in dataclasses.fields(cast(Any, kind)) if field.init]
    given: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            raise ConfigError(f"{_at(source)}unknown key {path}", hint=nearest(key, known))
        section = _section(kind, key, hints[key], values, base)
        if section is None:
            given[key] = _leaf(value, hints[key], path, source)
        elif isinstance(value, Mapping):
            below = _default(kind, key) if base is None else getattr(base, key)
            below = below if isinstance(below, section) else None
            given[key] = build(section, value, base=below, where=path, source=source)
        elif dataclasses.is_dataclass(value) or (value is None and type(None) in _options(hints[key])):
            given[key] = value
        else:
            raise ConfigError(f"{_at(source)}{path}={value!r} is not a section", hint=f"[{path}] and its keys")
    try:
        return dataclasses.replace(cast(Any, base), **given) if base is not None else kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{_at(source)}{error}", hint=error.hint) from None
    except TypeError as error:
        raise ConfigError(f"{_at(source)}{where or kind.__name__}: {error}") from None


def build_run(values: Values, *, base: RunConfig | None = None, source: str = "") -> RunConfig:
    """A `RunConfig` with these values over `base`."""
    return build(RunConfig, values, base=base or RunConfig(), source=source)


def from_keywords(model: str | Path, keywords: Values) -> RolloutConfig:
    """The configuration that keyword arguments of `seer.Rollout` stand for."""
    values: dict[str, Any] = {"model": str(model)}
    known = [field.name for field in dataclasses.fields(RolloutConfig)]
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keywords.items():
        if key in SHORT_NAMES and not (key == "pool" and not isinstance(value, str)):
            section, name = SHORT_NAMES[key]
            sections.setdefault(section, {})[name] = value
        elif key in known and key != "model":
            values[key] = value
        else:
            raise ConfigError(f"unknown setting {key!r}", hint=nearest(key, [*known[1:], *SHORT_NAMES]))
    for section, short in sections.items():
        whole = values.get(section, {})
        if isinstance(whole, Mapping):
            values[section] = {**whole, **short}
        elif dataclasses.is_dataclass(whole):
            values[section] = dataclasses.replace(cast(Any, whole), **short)
    return build(RolloutConfig, values)


def of_new_instances(config: RolloutConfig, keywords: Values) -> RolloutConfig:
    """The configuration of instances that join a rollout with settings of their own."""
    known = list(InstanceKeywords.__annotations__)
    unknown = next((key for key in keywords if key not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"{unknown!r} is no setting of single instances", hint=f"they may differ in {', '.join(known)}"
        )
    given = {key: value for key, value in keywords.items() if value is not None}
    kv = {SHORT_NAMES[key][1]: given.pop(key) for key in ("kv_memory_bytes", "kv_blocks") if key in given}
    if len(kv) > 1:
        raise ConfigError(f"kv_memory_bytes={kv['memory_bytes']!r} and kv_blocks={kv['blocks']!r}", hint="give one")
    if kv:
        given["kv"] = {"memory_bytes": None, "blocks": None} | kv
    if "gpus" in given and not config.on_cpu and config.hosting.ray is None:
        given["device"] = "cuda"  # the rollout may have one that is `cuda:N`
    return build(RolloutConfig, given, base=config)


def _section(kind: type, key: str, hint: Any, values: Values, base: Any) -> type | None:
    """The dataclass that this key holds, if it holds one."""
    if kind is RolloutConfig and key == "engine_settings":
        engine = values.get("engine", getattr(base, "engine", RolloutConfig.__dataclass_fields__["engine"].default))
        if engine not in ENGINE_CONFIGS:
            raise ConfigError(f"unknown engine {engine!r}", hint=nearest(str(engine), ENGINES))
        return ENGINE_CONFIGS[engine]
    for option in _options(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _default(kind: type, key: str) -> Any:
    """What a field holds that is not given, where a factory makes it."""
    factory = cast(Any, kind).__dataclass_fields__[key].default_factory
    return factory() if factory is not dataclasses.MISSING else None


def _leaf(value: Any, hint: Any, path: str, source: str) -> Any:
    if Path in _options(hint) and isinstance(value, str | Path):
        return check_path(value, f"{_at(source)}{path}")
    if typing.get_origin(hint) is typing.Literal and isinstance(value, str):
        return value  # the dataclass knows a better word than "enum value" for it
    if path.endswith("_bytes") and isinstance(value, str):
        return _size(value, f"{_at(source)}{path}")
    if path.rpartition(".")[2] == "gpus" and isinstance(value, str):
        return parse_gpus(value)
    return msgspec.convert(check(value, hint, f"{_at(source)}{path}"), hint)


def _size(text: str, name: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", hint=error.hint) from None


def _at(source: str) -> str:
    return f"{source}: " if source else ""
