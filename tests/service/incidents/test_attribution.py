"""Who may be accused of what: verdicts that would name the innocent, or claim what was not seen."""

from __future__ import annotations

from service.incidents.rounds import ACTIVATION, DERIVED, FINITE, HALF_BUCKET, INF, SHARD, Round, collective, verdict_of

from sentinel.incidents.model import Attribution, Stage
from sentinel.wire.messages import ClosedBy, Phase

TENSOR_PARALLEL = collective(ACTIVATION, group="tp", ranks=(0, 1))


def test_a_receiver_is_not_said_to_have_contributed_finite_gradients() -> None:
    """Tensor parallel: rank 0 is no suspect, yet its gradients were nonfinite, and the reason must not deny it."""
    told = Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0, 1)
    assert "rank 0 contributed finite gradients" not in verdict_of(told).reason


def test_a_rank_that_fed_nan_to_an_activation_reduction_is_the_suspect() -> None:
    """Rank 1 gave NaN activations and left before its backward; rank 0's gradients are not the reduction's fault."""
    told = Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0)
    verdict = verdict_of(told.closed(ClosedBy.EXIT, 1))
    assert (verdict.rule, verdict.suspect_ranks) == ("given_to_activation", (1,))


def test_an_activation_reduction_with_missing_reports_is_incomplete() -> None:
    """Whether the inputs were finite cannot be known while a rank's evidence is missing, so no verdict may claim it."""
    told = Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0, 1).lost(1, 0)
    verdict = verdict_of(told)
    assert verdict.attribution is not Attribution.REDUCTION_INDUCED


def test_a_rank_whose_first_evidence_was_lost_is_not_accused_of_it() -> None:
    """What rank 0 met first is lost, so whether it is origin or receiver is not known; rank 1 is still the origin."""
    told = Round(2, 3).wire(1, of=TENSOR_PARALLEL, raw=None).reduced(of=TENSOR_PARALLEL).raw(0, 1).lost(0, 0)
    assert verdict_of(told).suspect_ranks == (1,)


def test_a_rank_that_passes_on_is_not_accused_when_what_it_received_was_lost() -> None:
    """Rank 1 only passed on the first collective's result; losing that evidence must not make it an origin."""
    told = Round(2, 3).wire(0, of=HALF_BUCKET, found=INF, raw=FINITE).reduced(of=HALF_BUCKET, found=INF)
    told.wire(0, 1, of=DERIVED, found=INF, raw=FINITE).saw(Phase.APPLIED).lost(1, 0)
    assert verdict_of(told).suspect_ranks == (0,)


def test_the_owner_of_a_shard_is_not_accused_while_other_inputs_are_unknown() -> None:
    """Reduce-scatter: rank 0 gave 60,000 and saw no result of its own; the owner's small input bounds nothing."""
    verdict = verdict_of(Round(2, 3).reduced(1, of=collective(SHARD, dtype="float16"), found=INF, absmax=6_000.0))
    assert verdict.suspect_ranks == ()


def test_groups_of_one_name_and_other_ranks_are_not_one_collective() -> None:
    """Two groups may carry one name on different ranks; only the overflowing one's inputs count."""
    left, right = (collective(HALF_BUCKET, group="1", ranks=ranks) for ranks in ((0, 1), (2, 3)))
    told = Round(4, 3).reduced(of=left, found=INF, absmax=60_000.0).reduced(of=right, found=INF, absmax=10.0)
    assert verdict_of(told).rule == "sum_overflow"


def test_parameters_nonfinite_in_round_0_are_not_blamed_on_a_step() -> None:
    """There was no step before round 0, so the reason must not name one."""
    assert "step before" not in verdict_of(Round(2, 0).saw(Phase.PARAMS, 0)).reason


def test_gradients_that_nobody_could_look_at_are_not_called_finite() -> None:
    """Nonfinite on a wire as wide as the gradients, and no look at the gradients: a cast cannot have done it."""
    verdict = verdict_of(Round(2, 3).wire(1, raw=None).reduced())
    assert (verdict.stage, verdict.suspect_ranks) == (Stage.PRE_REDUCE, (1,))
