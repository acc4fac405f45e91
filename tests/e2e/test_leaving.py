"""A rank that leaves in the round in which it met NaN, in whatever way: the incident names the rank and the step all the same."""

from __future__ import annotations

import pytest
from training_run import Case, Ran, marks

pytestmark = pytest.mark.e2e

LOSS = ("nonfinite_loss", "forward", (1,), 3)
GRADIENT = ("nonfinite_gradient", "pre_reduce", (1,), 3)
EXPECTED = {
    "sys_exit": (1, LOSS),
    "system_exit": (1, LOSS),
    "runtime_error": (1, LOSS),
    "loss_refuses": (1, LOSS),
    "break_out": (0, LOSS),
    "error_in_clipping": (1, GRADIENT),
    "anomaly_mode": (1, GRADIENT),
    "killed_by_sigterm": (1, GRADIENT),
    "killed_by_sigkill": (1, GRADIENT),
}
# What is not right yet, and why; each goes as soon as it is.
KNOWN = {
    "system_exit": "a SystemExit that is raised passes neither sys.exit nor excepthook: the frames are gone at exit"
}


@pytest.mark.parametrize(
    ("case", "code", "verdict"),
    [
        pytest.param(Case("leaving.py", (name,)), *expected, id=name, marks=marks(name, KNOWN))
        for name, expected in EXPECTED.items()
    ],
)
def test_the_last_round_is_judged(ran: Ran, code: int, verdict: tuple[object, ...]) -> None:
    """The exit code is the job's own, and the only incident has the right kind, stage, rank and step."""
    assert ran.exit_code == code, ran.said
    assert ran.brief == [verdict], ran.said
    assert not ran.faults
    assert "sentinel: 1 incident" in ran.stderr
    assert "at step 3" in ran.stderr.lower()


@pytest.mark.parametrize("case", [pytest.param(Case("leaving.py", ("killed_at_once",)), id="at-once")])
def test_a_rank_whose_last_words_are_lost_makes_nobody_else_guilty(ran: Ran) -> None:
    """SIGTERM right behind the bad backward: rank 1 is named, or said to be missing; rank 0 is never blamed."""
    assert ran.exit_code == 1, ran.said
    assert [incident["step"] for incident in ran.incidents] == [3], ran.said
    (incident,) = ran.incidents
    assert 0 not in incident["suspect_ranks"], ran.said
    assert incident["suspect_ranks"] == [1] or 1 in incident["missing_ranks"], ran.said
