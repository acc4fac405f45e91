"""Who may be accused of what: verdicts that would name the innocent, or claim what was not seen."""

from __future__ import annotations

import pytest
from service.incidents.rounds import (
    ACTIVATION,
    BUCKET,
    DERIVED,
    FINITE,
    GATHERED,
    HALF_BUCKET,
    INF,
    SCALAR,
    SHARD,
    Round,
    collective,
    verdict_of,
)

from sentinel.incidents.model import Attribution, Kind, Stage
from sentinel.wire.messages import LATE, ClosedBy, Collective, Phase

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


LATER = collective(index=1)
SUMMED = collective(SCALAR, index=0)


@pytest.mark.parametrize("way", [GATHERED, SUMMED], ids=["gathered embeddings", "a summed number"])
def test_whoever_gave_nan_to_a_collective_of_the_forward_is_the_origin(way: Collective) -> None:
    """Rank 0's NaN is brought to every rank by what the forward exchanges: their losses and gradients follow from it."""
    told = Round(3, 3).wire(0, of=way, raw=None).loss().nan_gradient(0, 1, 2, of=LATER)
    verdict = verdict_of(told)
    assert (verdict.rule, verdict.suspect_ranks) == ("raw_gradient", (0,))


@pytest.mark.parametrize(("note", "origins"), [("", (1,)), (LATE, (0, 1))])
def test_a_result_that_was_written_before_the_look_was_not_received(note: str, origins: tuple[int, ...]) -> None:
    """Both ranks' hooks divide the first result by zero, in place; on rank 0 the look at it came too late."""
    second = collective(BUCKET, index=1)
    told = Round(2, 3).saw(Phase.REDUCED, 0, collective=BUCKET, note=note).wire(0, 1, of=second, raw=FINITE)
    assert verdict_of(told.reduced(of=second)).suspect_ranks == origins


BROADCAST = collective(GATHERED, op="broadcast_", group="0 broadcast")


@pytest.mark.parametrize(("phase", "rule"), [(Phase.PARAMS, "parameters_after_step"), (Phase.BUFFERS, "buffers")])
def test_state_that_was_handed_round_is_its_giver_s(phase: Phase, rule: str) -> None:
    """Rank 1's part of a sharded optimizer's parameters, or rank 0's buffers, are broadcast to all, NaN and all."""
    verdict = verdict_of(Round(3, 3).wire(1, of=BROADCAST, raw=None).saw(phase))
    assert (verdict.rule, verdict.suspect_ranks) == (rule, (1,))
    assert "rank 1 handed them to the others" in verdict.reason


SENT = collective(GATHERED, op="send", group="0 0 to 1", ranks=(0, 1))


@pytest.mark.parametrize("way", [ACTIVATION, GATHERED, SENT], ids=["a sum", "a gathering", "a send"])
@pytest.mark.parametrize("phase", [Phase.PARAMS, Phase.BUFFERS])
def test_state_that_nobody_handed_round_is_its_ranks(phase: Phase, way: Collective) -> None:
    """Activations, summed or gathered or sent down a pipeline, bring nobody parameters."""
    told = Round(2, 3).wire(0, of=way, raw=None).saw(phase)
    assert verdict_of(told).suspect_ranks == (0, 1)


GOT = collective(SENT, op="recv_")
SENT_BACK = collective(SENT, group="0 1 to 0", ranks=(1, 0))
GOT_BACK = collective(SENT_BACK, op="recv_")


def test_a_pipeline_s_first_stage_gave_what_the_last_lost_by() -> None:
    """Rank 0 computes no loss: it is named for the activations it sent, and rank 1 only got them, and sends its gradient back."""
    told = Round(2, 3).wire(0, of=SENT, raw=None).reduced(1, of=GOT).loss(1).wire(1, of=SENT_BACK, raw=None)
    verdict = verdict_of(told.raw(0, 1).record(0, loss=None))
    assert (verdict.kind, verdict.suspect_ranks) == (Kind.NONFINITE_GRADIENT, (0,))
    assert "rank 1 got theirs" in verdict.reason
    assert "its loss was finite" not in verdict.reason


def test_a_pipeline_s_last_stage_sent_nan_gradients_back() -> None:
    """What rank 0 got for its finite activations is not its own."""
    told = Round(2, 3).loss(1).wire(1, of=SENT_BACK, raw=None).reduced(0, of=GOT_BACK).raw(0, 1).record(0, loss=None)
    assert verdict_of(told).suspect_ranks == (1,)


def test_a_receive_that_nobody_could_look_at_is_known_from_its_sender() -> None:
    """The buffer was used again before anything was found: what rank 0 says that it sent is enough."""
    told = Round(2, 3).wire(0, of=SENT, raw=None).loss(1).raw(0, 1).record(0, loss=None)
    assert verdict_of(told).suspect_ranks == (0,)


def test_a_loss_that_was_handed_on_is_its_giver_s() -> None:
    """With finite gradients too: rank 0 gave NaN to what both gathered, and rank 1's loss followed."""
    told = Round(2, 3).wire(0, of=GATHERED, raw=None).loss()
    verdict = verdict_of(told)
    assert (verdict.kind, verdict.suspect_ranks) == (Kind.NONFINITE_LOSS, (0,))
    assert "rank 0 gave to the others" in verdict.reason


def test_losses_that_nobody_handed_on_are_their_ranks() -> None:
    """Both ranks' own losses were nonfinite, gathered or not."""
    assert verdict_of(Round(2, 3).loss()).suspect_ranks == (0, 1)
    assert verdict_of(Round(2, 3).wire(0, 1, of=GATHERED, raw=None).loss()).suspect_ranks == (0, 1)


def test_a_number_given_after_the_gradients_explains_none() -> None:
    """A metric that is summed once backward has run says nothing of how another rank's gradients came to be."""
    told = Round(2, 3).loss().nan_gradient(0, 1).wire(0, of=collective(SCALAR, index=1), raw=None)
    assert verdict_of(told).suspect_ranks == (0, 1)


def test_a_rank_that_gave_nan_itself_is_no_receiver() -> None:
    """Both ranks' losses were nonfinite before they were averaged for the log: both are origins."""
    told = Round(2, 3).wire(0, 1, of=SUMMED, raw=None).loss().nan_gradient(0, 1, of=LATER)
    assert verdict_of(told).suspect_ranks == (0, 1)


def test_a_rank_whose_loss_was_finite_received_nothing() -> None:
    """Its gradients became nonfinite in its own backward, whatever another rank's averaged loss was."""
    told = Round(2, 3).wire(0, of=SUMMED, raw=None).loss(0).nan_gradient(0, 1, of=LATER)
    assert verdict_of(told).suspect_ranks == (0, 1)


def test_a_maximum_brings_nobody_a_nan() -> None:
    """Only what adds up or is handed on spreads it for certain."""
    told = Round(2, 3).wire(0, of=collective(SUMMED, reduce_op="MAX"), raw=None).loss().nan_gradient(0, 1, of=LATER)
    assert verdict_of(told).suspect_ranks == (0, 1)


def test_ranks_of_another_group_received_nothing() -> None:
    """What ranks 0 and 1 gather does not reach rank 2."""
    pair = collective(GATHERED, group="pair gather", ranks=(0, 1))
    told = Round(3, 3).wire(0, of=pair, raw=None).loss().nan_gradient(0, 1, 2, of=LATER)
    assert verdict_of(told).suspect_ranks == (0, 2)


def test_a_metric_that_was_nan_beside_a_finite_loss_excuses_nobody() -> None:
    """Rank 1 averaged an accuracy of 0/0 before its backward; it is rank 0 whose loss and gradients were nonfinite."""
    told = Round(2, 3).wire(1, of=SUMMED, raw=None).loss(0).nan_gradient(0, of=LATER)
    verdict = verdict_of(told)
    assert (verdict.rule, verdict.suspect_ranks) == ("raw_gradient", (0,))
