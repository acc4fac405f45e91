"""How the agent gets into a process: by the launcher's injection, or by one line of the user's.

Owns the process's single agent. It is made when the first process group is, since only then the rank is known; taps on module
constructors are in place before, and what they saw is handed over.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sentinel_agent.config import AgentConfig

if TYPE_CHECKING:
    from sentinel_agent.agent import Agent
    from sentinel_agent.errors import Health

_agent: Agent | None = None
_config: AgentConfig | None = None
_roots: list[Any] = []


def attach(**options: Any) -> None:
    """Watch this process's training from now on; the same as being started under ``sentinel run``.

    Call it before the model is wrapped, before or after ``init_process_group``. ``options`` are fields of
    :class:`sentinel_agent.config.AgentConfig`. Calling it twice changes nothing. Raises TypeError for an unknown option.
    """
    global _config
    if _config is not None:
        return
    import torch.distributed as dist

    from sentinel_agent.inject.hooks import prepare

    _config = replace(AgentConfig.from_environment(), **options)
    prepare()
    if dist.is_available() and dist.is_initialized():
        process_group_made()


def detach() -> None:
    """Say goodbye and take every tap out again."""
    global _agent, _config
    if _agent is not None:
        _agent.stop()
    _agent, _config = None, None


def process_group_made() -> None:
    """The default process group exists: make the agent, once. Never raises."""
    global _agent
    if _agent is not None:
        from sentinel_agent.taps.wire import forget_groups

        forget_groups()
        return
    try:
        _agent = _make()
    except Exception as error:  # noqa: BLE001 - the training must start whatever is wrong with us
        print(
            f"sentinel: agent could not start, training goes on unwatched: {error!r}"[:400], file=sys.stderr, flush=True
        )


def _make() -> Agent:
    from sentinel_agent.agent import Agent, ranks

    agent = Agent(_config or AgentConfig.from_environment(), *ranks())
    agent.start()
    for root in _roots:
        agent.root_made(root)
    _roots.clear()
    return agent


def root_made(module: Any) -> None:
    """A wrapper of a trained module was constructed."""
    if _agent is not None:
        _agent.root_made(module)
    else:
        _roots.append(module)


def stand_in(agent: Any) -> None:
    """Let ``agent`` (a replay's session) hear what this process's agent would: roots that are made, FSDP's gradients."""
    global _agent
    _agent = agent
    for root in _roots:
        agent.root_made(root)
    _roots.clear()


def current() -> Agent | None:
    """This process's agent, if it runs."""
    return _agent


def health() -> Health | None:
    """Health of this process's agent, if it runs."""
    return _agent.health if _agent is not None else None
