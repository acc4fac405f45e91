"""FSDP2 in one process: full parameters from all ranks' shards, and gradients before they are reduced.

Owns two patches of FSDP's parameter groups, put in place when that module is imported. ``fully_shard`` itself runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from sentinel_agent.inject.lazy import after_import
from sentinel_agent.naming import user_name
from sentinel_agent.patching import wrap
from sentinel_agent.replay.session import Session

MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def install(session: Session) -> None:
    """Patch FSDP2 as soon as it is imported."""

    def patch(module: Any) -> None:
        wrap(module.FSDPParamGroup, "wait_for_unshard", lambda original: _unshard(original, session))
        reduce = module.foreach_reduce  # may be the agent's own tap already, which ``wrap`` would take for this one
        module.foreach_reduce = _reduce(reduce, session)

    after_import({MODULE: patch})


def _unshard(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def wait_for_unshard(group: Any) -> Any:
        gathered = group._all_gather_result is not None
        result = original(group)
        if session.live and gathered:
            with session.tracer.pause():
                for parameter in group.fsdp_params:
                    _fill(parameter, session)
        return result

    return wait_for_unshard


def _fill(parameter: Any, session: Session) -> None:
    """The fake all-gather has repeated this rank's shard: put in what every rank has recorded."""
    name = user_name(parameter._param_fqn or "")
    shards = session.recording.shards(name)
    whole = parameter._unsharded_param
    session.tracer.arrived(whole, f"parameter {name}")
    if not shards or sum(shard.shape[0] if shard.dim() else 0 for shard in shards) != whole.shape[0]:
        session.notes.append(f"{name}: not every rank's shard was recorded")
        return
    with torch.no_grad(), _unsafe_preserve_version_counter(whole):
        whole.data.copy_(torch.cat(shards))


def _reduce(original: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def foreach_reduce(fsdp_params: Any, unsharded_grads: Any, *args: Any, **kwargs: Any) -> Any:
        if session.live:
            with session.tracer.pause():
                for parameter, gradient in zip(fsdp_params, unsharded_grads, strict=False):
                    session.sinks.sharded_gradient(user_name(parameter._param_fqn or ""), gradient)
        return original(fsdp_params, unsharded_grads, *args, **kwargs)

    return foreach_reduce
