"""What a user reads at the start and at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.bundle.manifest import BatchEntry, Environment, PartHeader, SampleFinding
from sentinel.incidents.model import (
    Attribution,
    Cause,
    Incident,
    Kind,
    RankFinding,
    Severity,
    Stage,
    State,
    utc,
)
from sentinel.launch.relay import Drained
from sentinel.launch.summary import RunOutcome, closing, opening, sample_findings

BUNDLE = "bundles/a0-r000007"


def incident(**changes: object) -> Incident:
    """A rank-local gradient fault at step 7."""
    fields: dict[str, object] = {
        "id": "inc-1",
        "run_id": "run-1",
        "kind": Kind.NONFINITE_GRADIENT,
        "severity": Severity.CRITICAL,
        "step": 7,
        "round": 7,
        "attempt": 0,
        "stage": Stage.PRE_REDUCE,
        "attribution": Attribution.RANK_LOCAL,
        "suspect_ranks": (1,),
        "parameters": tuple(f"module.layer{i}.weight" for i in range(6)),
        "cause": Cause.DATA,
        "reason": "gradients of rank 1 were nonfinite before the reduction",
        "bundle": BUNDLE,
        "opened_at": utc(0.0),
        "updated_at": utc(0.0),
        "state": State.OPEN,
        "world_size": 2,
        "findings": (RankFinding(rank=1, phase="raw", parameters_total=18),),
    }
    return Incident.model_validate(fields | changes)


def write_part(run_dir: Path, rank: int, findings: tuple[SampleFinding, ...]) -> Path:
    """A part with sample findings, as the agent leaves it."""
    environment = Environment(argv=(), cwd="/", python="3", torch="2", host="h", pid=1)
    part = PartHeader(
        run_id="run-1",
        attempt=0,
        rank=rank,
        world_size=2,
        node=0,
        round=7,
        step=7,
        state_after_step=False,
        reason="evidence",
        written_at=0.0,
        batches=tuple(
            BatchEntry(index=n, round=6 + n, source="loader", structure={"image": {"tensor": f"b{n}.image"}})
            for n in (0, 1)
        ),
        sample_findings=findings,
        environment=environment,
    )
    path = run_dir / BUNDLE / f"rank-{rank:05d}" / "part.json"
    path.parent.mkdir(parents=True)
    path.write_text(part.model_dump_json())
    return path


CONSTANT = SampleFinding(tensor="b1.image", sample=5, what="constant", detail="all 0.25")


def test_an_incident_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step, rank, whose fault, parameters, the odd sample, the bundle and three commands: enough to go on with."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "D"
    write_part(run_dir, 1, (CONSTANT,))
    text = "\n".join(closing(RunOutcome(run_dir, [incident()], rounds_checked=40)))
    for expected in (
        "1 incident in 40 rounds",
        "At step 7, gradients became nonfinite on rank 1",
        "Rank-local: rank 1 made it before the reduction",
        "module.layer0.weight, module.layer1.weight",
        "and 14 more",
        "sample 5 of batch tensor 'image' on rank 1 is constant (zero variance)",
        f"D/{BUNDLE}",
        "sentinel incidents show inc-1 --run-dir D",
        f"sentinel dump show D/{BUNDLE}",
        f"sentinel dump verify D/{BUNDLE}",
    ):
        assert expected in text


def test_log_readers_find_the_words_they_look_for(tmp_path: Path) -> None:
    """Log attribution tools search for 'non-finite'; the headline says it."""
    assert "non-finite" in closing(RunOutcome(tmp_path, [incident()]))[0]


def test_a_healthy_run_is_one_short_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing found: one line of at most 100 columns, with what was looked at."""
    monkeypatch.chdir(tmp_path)
    lines = closing(RunOutcome(tmp_path / "sentinel-runs" / "20261130-165912-4f1c9a", [], 240, 3, Drained(0, {})))
    assert lines == ["no incidents in 240 rounds, 3 benign GradScaler skips · sentinel-runs/20261130-165912-4f1c9a"]
    assert len(lines[0]) <= 100


def test_what_the_guard_did_is_said(tmp_path: Path) -> None:
    """Skipped steps are counted, and a halted training is told with its exit code."""
    lines = closing(RunOutcome(tmp_path, [incident()], guard_skips=2, halted=True))
    assert [line for line in lines if "the guard left out 2 steps" in line]
    assert [line for line in lines if "exit code 93, not restarted" in line]
    assert not [line for line in closing(RunOutcome(tmp_path, [incident()])) if "the guard" in line]


def test_an_unwatched_run_is_not_called_healthy(tmp_path: Path) -> None:
    """No round seen is said as that, since 'no incidents' alone would be a promise nobody can make."""
    (line,) = closing(RunOutcome(tmp_path, []))
    assert "no round of training was seen" in line


def test_a_run_without_a_coordinator_says_where_its_reports_are(tmp_path: Path) -> None:
    """Reports that reached nobody are counted, and their place is named."""
    lines = closing(RunOutcome(tmp_path, None, drained=Drained(3, {"coordinator_unreachable": 12})))
    assert "no coordinator was reached" in lines[0]
    assert f"3 reports that may hold an incident reached no coordinator; kept in {tmp_path / 'spool'}" in lines
    assert "reports dropped: 12 coordinator_unreachable" in lines


def test_another_nodes_coordinator_is_named(tmp_path: Path) -> None:
    """A launcher whose incidents are elsewhere says where."""
    (line,) = closing(RunOutcome(tmp_path, None, http="http://head:1234", elsewhere="tcp://head:1"))
    assert "http://head:1234" in line


def test_many_incidents_stay_readable(tmp_path: Path) -> None:
    """Five are told, the rest counted with the command that lists them."""
    many = [incident(id=f"inc-{n}", bundle=None) for n in range(9)]
    lines = closing(RunOutcome(tmp_path, many))
    assert sum("At step 7" in line for line in lines) == 5
    assert any("and 4 more: sentinel incidents ls" in line for line in lines)
    assert not any("dump show" in line for line in lines)


def test_findings_beyond_the_first_are_counted(tmp_path: Path) -> None:
    """A batch full of odd samples is three lines and a count."""
    write_part(tmp_path, 1, tuple(CONSTANT.model_copy(update={"sample": n}) for n in range(10)))
    text = "\n".join(closing(RunOutcome(tmp_path, [incident()])))
    assert text.count("is constant") == 3
    assert "and 7 more findings" in text


def test_parts_that_cannot_be_read_say_nothing(tmp_path: Path) -> None:
    """A missing, torn or foreign part costs its sentence, never the summary."""
    assert sample_findings(tmp_path, incident()) == []
    assert sample_findings(tmp_path, incident(bundle=None)) == []
    path = write_part(tmp_path, 1, (CONSTANT,))
    path.write_text(path.read_text()[:-20])
    assert sample_findings(tmp_path, incident()) == []


def test_the_round_before_is_not_blamed(tmp_path: Path) -> None:
    """The window also holds the batch of the round before: its odd samples did not do it."""
    write_part(tmp_path, 1, (CONSTANT.model_copy(update={"tensor": "b0.image"}), CONSTANT, CONSTANT))
    assert sample_findings(tmp_path, incident()) == [
        "sample 5 of batch tensor 'image' on rank 1 is constant (zero variance)"
    ]


def test_paragraphs_fit_the_terminal(tmp_path: Path) -> None:
    """Long sentences are continued below themselves within 100 columns; a path stays whole."""
    long = incident(reason="gradients were nonfinite " * 12)
    lines = closing(RunOutcome(tmp_path, [long]))
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100


def test_only_the_suspects_parts_are_read(tmp_path: Path) -> None:
    """An innocent rank's odd sample is not offered as the cause."""
    write_part(tmp_path, 0, (CONSTANT,))
    assert sample_findings(tmp_path, incident()) == []


def test_names_from_the_job_cannot_move_the_cursor(tmp_path: Path) -> None:
    """Control characters in names and reasons reach the terminal as harmless marks."""
    evil = incident(parameters=("\x1b[2Jw",), reason="a\x1b]0;x\x07b", bundle=None)
    assert "\x1b" not in "\n".join(closing(RunOutcome(tmp_path, [evil])))
    assert "\x1b" not in opening("run\x1b[2J", tmp_path, None)


def test_the_opening_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run id, run directory as one would type it here, and the pages."""
    monkeypatch.chdir(tmp_path)
    assert opening("run-1", tmp_path / "D", "http://127.0.0.1:1") == "run run-1 · D · http://127.0.0.1:1"
    assert opening("run-1", Path("/elsewhere/D"), None) == "run run-1 · /elsewhere/D"
