"""Starts a replay in a process of its own, which may import torch and run the user's script, and brings its record back.

Owns that process: request in, progress out, record or refusal at the end. What a replay does is ``sentinel_agent/replay``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sentinel.bundle.replayed import BadOp, ReplayRecord, ReplayRequest
from sentinel.postmortem.lint.located import rules_for

_COMMAND = (sys.executable, "-m", "sentinel_agent.replay")


class ReplayFailed(RuntimeError):
    """No record: the text says why in one line, ``hint`` what to do."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


def replay(request: ReplayRequest, progress: Callable[[str], None]) -> ReplayRecord:
    """Replay a bundle; ``progress`` hears what is being tried. Raises ReplayFailed."""
    with subprocess.Popen(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(request.model_dump_json() + "\n")
        process.stdin.flush()  # it stays open: should this process die, the other sees the end of it and ends, too
        try:
            record = _listen(process.stdout, progress)
        except BaseException:
            process.terminate()  # it ends the trial that is running, too
            raise
        process.stdin.close()
        complaint = process.stderr.read().strip()
    if record is None:
        raise _failure(complaint)
    return record.model_copy(update={"lint": lint_of(record.first_bad_op)})


def lint_of(op: BadOp | None) -> tuple[dict[str, Any], ...]:
    """The lint rules that explain a located op."""
    if op is None or op.line is None or op.file is None:
        return ()
    number = op.line.rpartition(":")[2]
    return tuple(
        {"rule": one.rule, "line": one.line, "message": one.message, "fix": one.fix, "page": one.page}
        for one in rules_for(op.op, f"{op.file}:{number}")
    )


def _listen(lines: Iterator[str], progress: Callable[[str], None]) -> ReplayRecord | None:
    for line in lines:
        said = json.loads(line)
        if "progress" in said:
            progress(said["progress"])
        elif "error" in said:
            raise ReplayFailed(said["error"], "sentinel dump show lists what the bundle holds")
        elif "record" in said:
            return ReplayRecord.model_validate_json(json.dumps(said["record"]))
    return None


def _failure(complaint: str) -> ReplayFailed:
    last = complaint.splitlines()[-1] if complaint else "no message"
    if "No module named 'torch'" in complaint:
        return ReplayFailed("a replay needs PyTorch, which is not installed here", "pip install torch")
    return ReplayFailed(f"the replay process ended without a result: {last}")


def keep(bundle: Path) -> Path:
    """The directory that a bundle's record belongs in, for a path to it or to its manifest."""
    return bundle.parent if bundle.is_file() else bundle
