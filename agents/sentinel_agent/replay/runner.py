"""The process of one trial: takes on the recorded rank's identity, runs the user's script, and ends with an outcome.

Owns the set-up and the ways a run can end. What a script raises is an outcome here, never an error of ours; this is the only
place of the replay that catches everything.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from sentinel.bundle.manifest import Environment
from sentinel.bundle.replayed import TrialOutcome
from sentinel_agent.environment import assume
from sentinel_agent.replay import hooks, sharding
from sentinel_agent.replay.contributions import write_contributions
from sentinel_agent.replay.outcome import outcome_of, write_outcome
from sentinel_agent.replay.places import is_users
from sentinel_agent.replay.rebuild import rebuild
from sentinel_agent.replay.recording import Recording
from sentinel_agent.replay.sandbox import TRACKERS_OFF, Sandbox
from sentinel_agent.replay.session import Session
from sentinel_agent.replay.trial import Trial

LOG_FILE = "output.txt"


class Runner:
    """Runs one trial in this process and ends the process."""

    def __init__(self, recording: Recording, trial: Trial, scratch: Path) -> None:
        self._recording = recording
        self._trial = trial
        self._scratch = scratch
        self._began = time.perf_counter()
        self._sandbox = Sandbox(scratch)
        self._session = Session(recording, trial, self._finished)
        self._forward_lines: list[str] = []

    def run(self) -> NoReturn:
        """Never returns: the process ends with its outcome written."""
        where = self._recording.header.environment
        try:
            self._take_on(where)
            self._run_script(where)
            self._ended("the script ended")
        except SystemExit as error:
            self._ended(f"the script left with exit code {error.code}")
        except BaseException as error:  # noqa: BLE001 - whatever the user's script raises is what came of the trial
            self._raised(error)

    def _take_on(self, where: Environment) -> None:
        """Become the recorded process: variables, working directory, arguments, import path."""
        assume({**where.variables, **TRACKERS_OFF})
        if Path(where.cwd).is_dir():
            os.chdir(where.cwd)
        sys.argv = [self._trial.script or where.argv[0], *where.argv[1:]]
        if self._trial.anomaly:
            warnings.showwarning = self._warned  # type: ignore[assignment]
        hooks.install(self._session)
        sharding.install(self._session)
        self._sandbox.install()

    def _run_script(self, where: Environment) -> None:
        if self._trial.entry is not None:
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            self._run_entry(self._trial.entry)
        elif where.module is not None and self._trial.script is None:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(where.module, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")

    def _run_entry(self, entry: str) -> None:
        """``module:function``: called with each recorded micro-batch; a loss that it returns is run backward."""
        name, _, attribute = entry.partition(":")
        function: Any = getattr(importlib.import_module(name), attribute)
        if not dist.is_initialized():
            dist.init_process_group()
        session, entries = self._session, self._recording.entries
        loaded = [one for one in entries if one.source == "loader"] or list(entries)
        if session.forwarding:
            session.go_live()
        for one in loaded:
            batch = rebuild(one.structure, self._recording.batches)
            loss = function(batch["args"][0] if one.source == "forward" else batch)
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        session.stop("the entry function returned")

    def _warned(self, message: Warning | str, *_: Any) -> None:
        """Anomaly detection tells the forward's lines in a warning."""
        lines = [line.strip() for line in str(message).splitlines() if line.strip().startswith("File ")]
        self._forward_lines += [f"forward at {line}" for line in lines if is_users(line.split('"')[1])][-1:]

    def _ended(self, how: str) -> NoReturn:
        if self._session.live:
            self._session.stop(how)
        reached = f"{how} in round {self._session.clock.round}, before the recorded round"
        self._leave(TrialOutcome(status="not_reached", reason=reached, precision=self._trial.precision))

    def _raised(self, error: BaseException) -> NoReturn:
        text = " ".join(str(error).split())[:300]
        said = f"{type(error).__name__}: {text}" + _where(error)
        if self._trial.anomaly and self._session.live:
            anomaly = "; ".join([said, *self._forward_lines])
            self._leave(TrialOutcome(status="replayed", nonfinite=True, sink="anomaly", anomaly=anomaly))
        self._session.raised(error)
        if self._session.live and self._session.sinks.nonfinite:
            self._session.stop(f"the script raised {said}")
        self._leave(TrialOutcome(status="script_raised", reason=said, precision=self._trial.precision))

    def _finished(self, session: Session) -> NoReturn:
        if self._trial.contributions is not None:
            write_contributions(self._trial.contributions, session.sinks.contributions)
        self._leave(outcome_of(session, tuple(self._sandbox.diverted)))

    def _leave(self, outcome: TrialOutcome) -> NoReturn:
        took = round(time.perf_counter() - self._began, 3)
        write_outcome(outcome.model_copy(update={"seconds": took}), self._scratch)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _where(error: BaseException) -> str:
    """The line of the user's code that raised."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            found = f" ({Path(file).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found
