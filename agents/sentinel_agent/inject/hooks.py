"""What is patched in torch when, as its modules are imported: only what must be in place before the user's code runs.

Owns the list. All else is installed by the agent once a process group exists. Imports neither torch nor anything heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sentinel_agent.inject.lazy import after_import, forget_imports

CONSTRUCTORS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "torch._dynamo.eval_frame": "OptimizedModule",
}
"""Module -> class whose new instances are roots of what is trained."""

_prepared = False


def prepare() -> None:
    """Register for the imports that matter; idempotent. Never raises."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    after_import({**{name: _guarded(_constructor_tap) for name in CONSTRUCTORS}, **_FUNCTIONS})


def forget() -> None:
    """What was patched has been put back: ``prepare`` may be called again."""
    global _prepared
    forget_imports()
    _prepared = False


def _guarded(callback: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def call(module: ModuleType) -> None:
        try:
            callback(module)
        except Exception as error:  # noqa: BLE001 - an import of torch must never fail because of us
            print(f"sentinel: cannot tap {module.__name__}: {error!r}"[:300], file=sys.stderr)

    return call


def _constructor_tap(module: ModuleType) -> None:
    from sentinel_agent.patching import wrap

    wrap(getattr(module, CONSTRUCTORS[module.__name__]), "__init__", _constructed)


def _constructed(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from sentinel_agent import process

        process.root_made(self)

    return init


def _wrap_both(module: ModuleType, package: str, name: str, make: Callable[[Any], Any]) -> None:
    """Wrap a function, and its second name in the package users import it from, if that was imported before us."""
    from sentinel_agent.patching import alias, wrap

    original = getattr(module, name)
    wrap(module, name, make)
    for other in (package, package + "._fully_shard"):
        if other in sys.modules:
            alias(sys.modules[other], name, original, getattr(module, name))


def _comm_hook_tap(module: ModuleType) -> None:
    from sentinel_agent.taps import comm_hook

    comm_hook.install(module)


def _process_group_tap(module: ModuleType) -> None:
    _wrap_both(module, "torch.distributed", "init_process_group", _group_made)


def _group_made(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        from sentinel_agent import process

        process.process_group_made()
        return result

    return init_process_group


def _foreach_reduce_tap(module: ModuleType) -> None:
    from sentinel_agent import process
    from sentinel_agent.taps import fsdp

    fsdp.install(module, process.health)


def _fully_shard_tap(module: ModuleType) -> None:
    _wrap_both(module, "torch.distributed.fsdp", "fully_shard", _sharded)


def _sharded(original: Callable[..., Any]) -> Callable[..., Any]:
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(module, *args, **kwargs)
        from sentinel_agent import process

        process.root_made(result)
        return result

    return fully_shard


_FUNCTIONS = {
    "torch.distributed": _guarded(_comm_hook_tap),
    "torch.distributed.distributed_c10d": _guarded(_process_group_tap),
    "torch.distributed.fsdp._fully_shard._fully_shard": _guarded(_fully_shard_tap),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": _guarded(_foreach_reduce_tap),
}
