"""The JSON contract: names, enum values, and NaN that survives."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError
from story import STARTED, incident

from sentinel.incidents.model import (
    Attribution,
    Cause,
    FirstBadOp,
    Incident,
    IncidentList,
    Kind,
    RankFinding,
    Severity,
    Stage,
    State,
    utc,
)

CONTRACT = {
    "id",
    "kind",
    "severity",
    "step",
    "round",
    "attempt",
    "stage",
    "attribution",
    "suspect_ranks",
    "parameters",
    "cause",
    "reason",
    "first_bad_op",
    "bundle",
    "opened_at",
    "state",
}

VALUES = {
    Kind: "nonfinite_gradient nonfinite_loss nonfinite_parameters nonfinite_buffers bad_reduction replica_divergence "
    "step_disagreement scaler_collapse stalled_training silent_overflow misuse rank_silent",
    Stage: "init_weights params forward pre_reduce wire_cast between_collectives post_reduce not_reduced optimizer none",
    Attribution: "rank_local multi_rank all_ranks reduction_induced none",
    Severity: "critical warning info",
    Cause: "data numerics optimization communication hardware framework unknown",
    State: "open updated resolved",
}


def test_an_incident_has_the_names_of_the_contract() -> None:
    """Programs that read our JSON find every promised name, also where there is nothing to say."""
    bare = incident(bundle=None, first_bad_op=None, parameters=())
    assert set(json.loads(bare.model_dump_json())) >= CONTRACT


def test_a_list_has_the_names_of_the_contract() -> None:
    """The outer object carries its schema version and the run."""
    dumped = json.loads(IncidentList(run_id="r", incidents=(incident(),)).model_dump_json())
    assert list(dumped) == ["schema_version", "run_id", "incidents"]
    assert dumped["schema_version"] == 1


@pytest.mark.parametrize("vocabulary", VALUES, ids=lambda v: v.__name__)
def test_vocabularies_are_those_of_the_contract(vocabulary: type[Kind]) -> None:
    """Enum values are read by other programs: adding one is a decision, losing one a break."""
    assert {member.value for member in vocabulary} == set(VALUES[vocabulary].split())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_numbers_survive_json(value: float) -> None:
    """The very thing we detect is not turned into null, and our own output can be read back."""
    one = incident(findings=(RankFinding(rank=1, phase="loss", absmax=value, wire_absmax=value, loss=value),))
    text = one.model_dump_json()
    assert json.loads(text)["findings"][0]["loss"] in {"NaN", "Infinity", "-Infinity"}
    back = Incident.model_validate_json(text).findings[0].loss
    assert back is not None
    assert str(back) == str(value)


def test_an_incident_survives_json_whole() -> None:
    """What is written is what is read."""
    one = incident(first_bad_op=FirstBadOp(op="aten.div", phase="forward", module="norm", line="train.py:12"))
    assert Incident.model_validate_json(one.model_dump_json()) == one


def test_times_are_utc_in_rfc_3339() -> None:
    """A reader anywhere sorts and compares them as text."""
    assert json.loads(incident(opened_at=utc(STARTED)).model_dump_json())["opened_at"].endswith("Z")
    assert utc(0.0).isoformat() == "1970-01-01T00:00:00+00:00"


def test_unknown_fields_are_refused() -> None:
    """A record of a later version is not half-read."""
    fields = json.loads(incident().model_dump_json())
    with pytest.raises(ValidationError, match="surprise"):
        Incident.model_validate({**fields, "surprise": 1})


def test_incidents_do_not_change_in_place() -> None:
    """A newer state is a new record."""
    with pytest.raises(ValidationError, match="frozen"):
        incident().step = 8  # type: ignore[misc]
