"""The page that people read, and the process that makes the record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sentinel.bundle.replayed import (
    BadOp,
    OperandStatistics,
    ReplayRecord,
    ReplayRequest,
    is_replay_file,
    replay_file,
    write_record,
)
from sentinel.postmortem.replay_page import describe_replay
from sentinel.postmortem.replayer import ReplayFailed, lint_of, replay


def record(**changes: Any) -> ReplayRecord:
    """A record of a division by zero."""
    op = BadOp(
        op="aten.div.Tensor",
        kind="created",
        phase="forward",
        module="head",
        line="train.py:12",
        code="return x / x.std(1)",
        inputs=(OperandStatistics(dtype="float32", shape=(8, 4), minimum=-1.0, maximum=2.0, zeros=4),),
        outputs=(OperandStatistics(dtype="float32", shape=(8, 4), nan=4),),
        rows=(5,),
        batch_size=8,
    )
    fields: dict[str, Any] = {
        "bundle": "a0-r000003",
        "rank": 1,
        "round": 3,
        "step": 3,
        "reproduced": True,
        "precision": {"same": "nonfinite", "fp32": "nonfinite", "bf16": "not_run", "fp16": "not_run"},
        "first_bad_op": op,
        "samples": (5,),
        "cause": "data",
        "verdict": "division_by_zero",
        "reason": "1 of the divisors are zero",
    }
    return ReplayRecord(**(fields | changes))


def test_the_page_says_what_where_and_with_which_values() -> None:
    """Verdict, op, module, code line, operands, rows and precisions are all there, the verdict first."""
    lines = describe_replay(record()).splitlines()
    assert lines[0] == "Reproduced: step 3 of rank 1, bundle a0-r000003, in 0.0 s"
    assert lines[1] == "data: 1 of the divisors are zero"
    text = "\n".join(lines)
    for part in ("aten.div.Tensor in forward", "head", "train.py:12", "8 x 4: -1 to 2, 4 zeros", "4 NaN", "5 (of 8)"):
        assert part in text


def test_names_from_a_bundle_are_harmless_on_a_terminal() -> None:
    """Escape sequences in a reason or in code do not reach the terminal."""
    text = describe_replay(record(reason="\x1b[2Jgone", notes=("\x1b]0;x",)))
    assert "\x1b" not in text


def test_a_replay_that_did_not_run_gives_the_entry_form() -> None:
    """Where the script could not be replayed, the page ends with the function to write instead."""
    text = describe_replay(record(verdict="not_replayed_script_raised", cause="unknown", first_bad_op=None))
    assert text.startswith("Not replayed")
    assert "--entry module:replay_step" in text


def test_the_record_is_kept_whole(tmp_path: Path) -> None:
    """What is written beside the parts is read back equal, and nothing else is left there."""
    path = write_record(tmp_path, record())
    assert ReplayRecord.model_validate_json(path.read_text()) == record()
    assert [p.name for p in tmp_path.iterdir()] == [replay_file(1)]
    assert is_replay_file(path.name)
    assert not is_replay_file("replay-rank-../x.json")


def test_a_missing_bundle_is_one_line(tmp_path: Path) -> None:
    """The replay's process says in one line what it cannot open."""
    with pytest.raises(ReplayFailed, match="no bundle at"):
        replay(ReplayRequest(bundle=str(tmp_path / "none")), lambda _words: None)


def test_lint_needs_a_place() -> None:
    """An op without a line has no lint."""
    assert lint_of(None) == ()
    assert lint_of(record().first_bad_op) == ()
