"""The agent's settings, read once from the environment that the launcher made.

Owns the only reads of the environment in a training process.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from sentinel.wire import names


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What this process's agent may do. Times in seconds, sizes in bytes.

    ``dump_level``: ``stats`` writes structure and statistics only, ``batch`` also batches, RNG states and parameters,
    ``full`` also the state of optimizers and GradScaler.
    ``redact`` names a function (``module:function``) that decides what of a batch is written (``redaction.py``).
    ``audit`` traces the forward of rounds 1, 2, 4, 8, … for half-precision overflow that is absorbed, within a budget, and never
    where anything is compiled. Off unless asked for: operators that call others inside are not autocast under a dispatch mode.
    ``guard`` is what is done about a step whose gradients every rank knows to be nonfinite: ``observe`` nothing, ``skip`` leaves it
    out (``max_skips`` in a row and ``max_skips_total`` in all, then it halts), ``halt`` ends the training.
    ``alive_seconds`` is how long a rank says nothing before it says that it is alive.
    ``timers`` fills ``RoundClosed.check_seconds``; off in normal runs. ``check_delay`` sleeps before each check and exists for
    tests of the joins. ``dump_round`` writes this round's part whatever it holds, for tests of replay. ``fail_at`` raises inside
    the named tap and exists for tests of the latch.
    """

    run_id: str = "run"
    run_dir: Path = field(default_factory=Path.cwd)
    node: int = 0
    relay: str | None = None
    join: str | None = None
    command_key: bytes = b""
    attempt: int = 0
    local_rank: int = 0
    host: str = field(default_factory=socket.gethostname)
    dump_level: str = "batch"
    window_rounds: int = 2
    window_bytes: int = 256 << 20
    clone_below: int = 1 << 20
    part_bytes: int = 10 << 30
    max_bundles: int = 8
    redact: str = ""
    audit: bool = False
    guard: str = "observe"
    max_skips: int = 10
    max_skips_total: int = 100
    timers: bool = False
    goodbye_seconds: float = 1.0
    alive_seconds: float = 10.0
    check_delay: float = 0.0
    dump_round: int = -1
    fail_at: str = ""

    @staticmethod
    def from_environment() -> AgentConfig:
        """Settings of a process that the launcher started. Unknown options are an error: launcher and agent are one version."""
        env = os.environ
        options = json.loads(env.get(names.ENV_AGENT_OPTIONS, "{}"))
        return AgentConfig(
            run_id=env.get(names.ENV_RUN_ID, "run"),
            run_dir=Path(env.get(names.ENV_RUN_DIR, ".")).absolute(),
            node=int(env.get(names.ENV_NODE, "0")),
            relay=env.get(names.ENV_RELAY),
            join=env.get(names.ENV_JOIN),
            command_key=bytes.fromhex(env.get(names.ENV_COMMAND_KEY, "")),
            attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            **options,
        )


def switched_on() -> bool:
    """True if the launcher asked for the agent in this process and its children."""
    return os.environ.get(names.ENV_AGENT) == "1"
