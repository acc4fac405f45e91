"""``sentinel incidents``: the JSON contract, the page, the exit codes, and errors of one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import story

from sentinel.incidents.model import Kind, Severity, State

CONTRACT = {
    "id", "kind", "severity", "step", "round", "attempt", "stage", "attribution", "suspect_ranks", "parameters", "cause",
    "reason", "first_bad_op", "bundle", "opened_at", "state",
}  # fmt: skip

Command = Callable[..., Any]


def test_list_prints_the_contract(sentinel: Command, run_dir: Path) -> None:
    """``ls -o json`` prints schema version, run id and incidents with every field of the contract."""
    ran = sentinel("incidents", "ls", "--run-dir", run_dir, "-o", "json")
    printed = json.loads(ran.out)
    assert (printed["schema_version"], printed["run_id"]) == (1, story.RUN)
    (only,) = printed["incidents"]
    assert set(only) >= CONTRACT
    assert only["suspect_ranks"] == [1]
    assert only["bundle"] == f"bundles/{story.BUNDLE}"


def test_list_exits_three_when_something_was_found(sentinel: Command, run_dir: Path) -> None:
    """A listed incident makes the exit code 3, in both formats, unless the user asks for 0."""
    assert sentinel("incidents", "ls", "--run-dir", run_dir).code == 3
    assert sentinel("incidents", "ls", "--run-dir", run_dir, "-o", "json").code == 3
    assert sentinel("incidents", "ls", "--run-dir", run_dir, "--exit-zero").code == 0


def test_resolved_incidents_count_and_info_does_not(sentinel: Command, tmp_path: Path) -> None:
    """A resolved incident still makes the exit code 3; one that is only for the record does not."""
    resolved = story.write_database(tmp_path / "r", story.incident(state=State.RESOLVED))
    noted = story.write_database(tmp_path / "i", story.incident(severity=Severity.INFO))
    assert sentinel("incidents", "ls", "--run-dir", resolved).code == 3
    assert sentinel("incidents", "ls", "--run-dir", resolved, "--state", "open").code == 0
    assert sentinel("incidents", "ls", "--run-dir", noted).code == 0


def test_healthy_run_says_so(sentinel: Command, healthy_dir: Path) -> None:
    """Without incidents the table is a line on stderr, the JSON an empty list, and the exit code 0."""
    ran = sentinel("incidents", "ls", "--run-dir", healthy_dir)
    assert (ran.code, ran.out, ran.err) == (0, "", "no incidents\n")
    printed = json.loads(sentinel("incidents", "ls", "--run-dir", healthy_dir, "-o", "json").out)
    assert printed == {"schema_version": 1, "run_id": story.RUN, "incidents": []}


def test_list_filters_by_kind(sentinel: Command, tmp_path: Path) -> None:
    """``--kind`` keeps only incidents of that kind, and an unknown kind is a usage error that names the known ones."""
    loss = story.incident(id="a0-r000009-02", kind=Kind.NONFINITE_LOSS)
    directory = story.write_database(tmp_path / "run", story.incident(), loss)
    ran = sentinel("incidents", "ls", "--run-dir", directory, "--kind", "nonfinite_loss")
    assert "a0-r000009-02" in ran.out
    assert story.incident().id not in ran.out
    refused = sentinel("incidents", "ls", "--run-dir", directory, "--kind", "nonsense")
    assert refused.code == 2
    assert "nonfinite_loss" in refused.err


def test_newest_run_is_the_default(sentinel: Command, tmp_path: Path) -> None:
    """Without --run-dir the newest directory below ./sentinel-runs is read."""
    story.write_database(tmp_path / "sentinel-runs" / "20261130-1")
    story.write_database(tmp_path / "sentinel-runs" / "20261130-2", story.incident())
    assert story.incident().id in sentinel("incidents", "ls").out


def test_show_is_the_whole_story(sentinel: Command, run_dir: Path) -> None:
    """The page names step, rank, whose fault it is not, parameters, the odd sample with its index, bundle and commands."""
    ran = sentinel("incidents", "show", story.incident().id, "--run-dir", run_dir)
    assert ran.code == 0
    for part in (
        "At step 7, gradients became nonfinite on rank 1, before the reduction.",
        "Rank-local: rank 1 made it before the reduction, which then only spread it",
        "head.2.bias, head.2.weight and 8 more",
        "sample 5 (data set index 235) of the DataLoader's batch, tensor image is constant (zero variance)",
        f"sentinel dump show {run_dir}/bundles/{story.BUNDLE}",
        f"sentinel dump verify {run_dir}/bundles/{story.BUNDLE}",
        f"sentinel incidents export {story.incident().id} --run-dir {run_dir}",
    ):
        assert part in ran.out


def test_show_takes_the_beginning_of_an_id(sentinel: Command, tmp_path: Path) -> None:
    """An id may be cut short while it is unique; if not, the error says how many it fits and names one."""
    other = story.incident(id="a0-r000009-02", round=9, step=9)
    directory = story.write_database(tmp_path / "run", story.incident(), other)
    assert "step 9" in sentinel("incidents", "show", "a0-r000009", "--run-dir", directory).out
    ambiguous = sentinel("incidents", "show", "a0", "--run-dir", directory)
    assert (ambiguous.code, ambiguous.out) == (2, "")
    assert ambiguous.err.startswith("sentinel: error: 2 incidents begin with a0\nhint: ")


def test_same_id_in_two_runs_asks_which(sentinel: Command, tmp_path: Path) -> None:
    """A database of several runs has no run id of its own, and an id that two runs have needs --run-id."""
    twin = story.incident(run_id="digits-2", step=8)
    directory = story.write_database(tmp_path / "run", story.incident(), twin, run_ids=(story.RUN, "digits-2"))
    assert json.loads(sentinel("incidents", "ls", "--run-dir", directory, "-o", "json").out)["run_id"] is None
    assert sentinel("incidents", "show", twin.id, "--run-dir", directory).code == 2
    assert "step 8" in sentinel("incidents", "show", twin.id, "--run-dir", directory, "--run-id", "digits-2").out


def test_show_as_json_is_the_incident(sentinel: Command, run_dir: Path) -> None:
    """``show -o json`` is one incident of the contract."""
    printed = json.loads(sentinel("incidents", "show", "a0", "--run-dir", run_dir, "-o", "json").out)
    assert printed == json.loads(story.incident().model_dump_json())


@pytest.mark.parametrize(("form", "begins"), [("json", "{"), ("jsonl", '{"id"'), ("markdown", "## nonfinite_gradient")])
def test_export_writes_the_format(sentinel: Command, run_dir: Path, tmp_path: Path, form: str, begins: str) -> None:
    """``export`` writes each format to stdout or a file, the same text."""
    shown = sentinel("incidents", "export", "--run-dir", run_dir, "--format", form)
    assert shown.out.startswith(begins)
    target = tmp_path / "out"
    ran = sentinel("incidents", "export", "--run-dir", run_dir, "--format", form, "--to", target)
    assert (ran.code, ran.out) == (0, "")
    assert target.read_text() == shown.out


def test_nan_survives_as_a_string(sentinel: Command, tmp_path: Path) -> None:
    """A NaN loss is the string NaN in JSON, so that every JSON reader can read it."""
    finding = story.incident().findings[0].model_copy(update={"loss": float("nan")})
    directory = story.write_database(tmp_path / "run", story.incident(findings=(finding,)))
    (only,) = json.loads(sentinel("incidents", "ls", "--run-dir", directory, "-o", "json").out)["incidents"]
    assert only["findings"][0]["loss"] == "NaN"


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("ls",), 1, "no runs below ./sentinel-runs"),
        (("ls", "--run-dir", "nowhere"), 1, "no run directory nowhere"),
        (("ls", "--run-dir", "empty"), 1, "no incident database at"),
        (("ls", "--run-dir", "torn"), 1, "is not an incident database"),
        (("ls", "--http", "http://127.0.0.1:9"), 4, "cannot reach coordinator http://127.0.0.1:9 (Connection refused)"),
        (("ls", "--http", "ftp://x"), 2, "is not an address of pages"),
        (("ls", "--outputs", "json"), 2, "No such option: --outputs"),
        (("show",), 2, "Missing argument 'ID'"),
        (("lsx",), 2, "No such command 'lsx'"),
    ],
)
def test_errors_are_a_line_and_a_hint(
    sentinel: Command, tmp_path: Path, words: tuple[str, ...], code: int, error: str
) -> None:
    """Whatever is wrong is said in one line with a hint on stderr, with nothing on stdout and the documented code."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "sentinel.db").write_bytes(b"not a database, but long enough to look at" * 30)
    ran = sentinel("incidents", *words)
    lines = ran.err.splitlines()
    assert (ran.code, ran.out, len(lines)) == (code, "", 2)
    assert lines[0].startswith("sentinel: error: ")
    assert error in lines[0]
    assert lines[1].startswith("hint: ")


def test_unknown_incident_is_a_failure(sentinel: Command, run_dir: Path) -> None:
    """Asking for an incident that is not there says so and how to list them."""
    ran = sentinel("incidents", "show", "zzz", "--run-dir", run_dir)
    assert (ran.code, ran.err) == (1, "sentinel: error: no incident zzz\nhint: sentinel incidents ls lists them\n")
