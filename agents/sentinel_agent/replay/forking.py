"""Runs trials, each in a process forked from this one, which has imported torch once and for all.

Owns the processes: their scratch directories, their output, their deadline. A trial that hangs is killed with all it has started.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from sentinel.bundle.replayed import TrialOutcome
from sentinel_agent.replay.outcome import read_outcome
from sentinel_agent.replay.recording import Recording
from sentinel_agent.replay.runner import LOG_FILE, Runner
from sentinel_agent.replay.trial import Trial

_POLL_SECONDS: Final = 0.01
_TAIL_BYTES: Final = 4096


def run_trial(recording: Recording, trial: Trial, scratch: Path) -> TrialOutcome:
    """Run one trial to its end or its deadline; whatever happens is an outcome."""
    place = scratch / trial.name
    place.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        _become_trial(recording, trial, place)
    status = _wait(pid, trial.timeout)
    return _outcome(status, trial, place)


def _become_trial(recording: Recording, trial: Trial, place: Path) -> None:
    """In the child: its own process group, its output in a file, no input."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(place / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, descriptor)
    Runner(recording, trial, place).run()


def _wait(pid: int, timeout: float) -> int | None:
    """Exit status as ``os.waitpid`` gives it; None if the deadline came first, the trial then being gone."""
    deadline = time.monotonic() + timeout
    ended = False
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended = True
                return status
            time.sleep(_POLL_SECONDS)
        return None
    finally:
        if not ended:  # too late, or this process is told to end
            _kill(pid)


def _kill(pid: int) -> None:
    """End a trial and what it has started. A trial that has not made its own group yet is alone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _outcome(status: int | None, trial: Trial, place: Path) -> TrialOutcome:
    if status is None:
        reason = f"still running after {trial.timeout:.0f} s"
        return TrialOutcome(status="timed_out", reason=reason, precision=trial.precision)
    try:
        outcome = read_outcome(place)
    except ValidationError as error:
        return TrialOutcome(status="crashed", reason=str(error)[:200], precision=trial.precision)
    if outcome is None:
        reason = f"ended with {_ending(status)} and no outcome; its last words: {_last_line(place)}"
        return TrialOutcome(status="crashed", reason=reason, precision=trial.precision)
    return outcome


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _last_line(place: Path) -> str:
    try:
        tail = (place / LOG_FILE).read_bytes()[-_TAIL_BYTES:]
    except OSError:
        return "none"
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "none"
