# SPDX-License-Identifier: Apache-2.0
"""A CPU platform for verl 0.9.x, for tests only: `VERL_USE_EXTERNAL_MODULES=verl_cpu` loads it in every process.

Training runs on gloo, "GPU" is a logical resource of Ray, and weights go through shared memory. No file of
verl changes. The trainer looks for finished responses more often than verl's two seconds: the toy's take about one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
import verl.plugin.platform.platform_manager as platform_manager
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl_after_import import after_import

POLL_S = 0.2

_CONSTANTS: dict[str, Any] = {
    "mem_get_info": (1 << 33, 1 << 34),
    "get_device_name": "CPU",
    "get_rng_state": torch.zeros(1, dtype=torch.uint8),
    "is_initialized": True,
}
_ZEROS = ("max_memory", "memory_", "reset_")
_NOTHING = ("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "set_device", "set_rng_state")


class _CpuModule(types.ModuleType):
    """The names of `torch.cuda` that verl uses, on a CPU."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name.startswith(_ZEROS):
            return lambda *_, **__: 0
        if name in _NOTHING:
            return lambda *_, **__: None
        if name in _CONSTANTS:
            return lambda *_, **__: _CONSTANTS[name]
        raise AttributeError(name)


DEVICE = _CpuModule("verl_cpu_device")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """What verl asks of a platform."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: DEVICE)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl passes it to Tensor.to()

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # a logical resource

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights go through shared memory

    def cudart(self) -> None:
        return None


def _named_once(init: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch refuses the two backends that verl names where the device is the CPU."""

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    return init_process_group


# verl has asked for its platform before it loads external modules.
platform_manager._current_platform = PlatformCPU()
torch.distributed.init_process_group = c10d.init_process_group = _named_once(c10d.init_process_group)


def _poll_often(module: Any) -> None:
    buffer = module.ReplayBuffer
    usual = buffer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)
        self.poll_interval = POLL_S

    buffer.__init__ = init


after_import({"verl.trainer.ppo.v1.replay_buffer": _poll_often})
