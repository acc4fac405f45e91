"""How the agent gets into a process: by the launcher's injection, or by one line of the user's.

Owns the process's single agent. It is made when the first process group is, since only then the rank is known; taps on module
constructors are in place before, and what they saw is handed over.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sentinel_agent.config import AgentConfig
from sentinel_agent.errors import one_line, say

if TYPE_CHECKING:
    from sentinel_agent.agent import Agent
    from sentinel_agent.errors import Health

_agent: Agent | None = None
_config: AgentConfig | None = None
_roots: list[weakref.ref[Any]] = []


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
    from sentinel_agent.inject.hooks import forget
    from sentinel_agent.patching import restore

    if _agent is not None:
        _agent.stop()
    restore()
    forget()
    _roots.clear()
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
        say(f"sentinel: agent could not start, training goes on unwatched: {one_line(error)}")


def _make() -> Agent:
    from sentinel_agent.agent import Agent, ranks

    agent = Agent(_config or AgentConfig.from_environment(), *ranks())
    agent.start()
    _hand_over(agent)
    return agent


def _hand_over(agent: Any) -> None:
    for ref in _roots:
        if (root := ref()) is not None:
            agent.root_made(root)
    _roots.clear()


def root_made(made: Any) -> None:
    """Wrappers of trained modules were constructed: one, or the list that ``fully_shard`` took. Never raises."""
    for module in made if isinstance(made, list | tuple) else [made]:
        if _agent is not None:
            _agent.health.guarded("root", _agent.root_made)(module)
        else:
            _roots.append(weakref.ref(module))


def stand_in(agent: Any) -> None:
    """Let ``agent`` (a replay's session) hear what this process's agent would: roots that are made, FSDP's gradients."""
    global _agent
    _agent = agent
    _hand_over(agent)


def current() -> Agent | None:
    """This process's agent, if it runs."""
    return _agent


def health() -> Health | None:
    """Health of this process's agent, if it runs."""
    return _agent.health if _agent is not None else None
