"""Every verdict has words: sentences for each kind, stage, cause and attribution."""

from __future__ import annotations

import pytest
import story

from sentinel.incidents.model import Attribution, Cause, Kind, RankFinding, Stage
from sentinel.postmortem.wording import CAUSE_WORDS, KIND_WORDS, STAGE_WORDS, attribution_sentence, verdict_sentence
from sentinel.wire.messages import ANOMALY


def test_nothing_is_without_words() -> None:
    """A kind, stage or cause that is added to the model must get its words."""
    assert set(KIND_WORDS) == set(Kind)
    assert set(STAGE_WORDS) == set(Stage)
    assert set(CAUSE_WORDS) == set(Cause)


def _seen(rank: int, op: str | None) -> RankFinding:
    return RankFinding(rank=rank, phase="wire" if op else "raw", op=op, parameters=("weight",))


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([_seen(1, "allreduce_"), _seen(0, "allreduce_")], "Rank-local: rank 1 made it itself; the other ranks got it"),
        ([_seen(1, None)], "Rank-local: rank 1 made it itself, and no reduction was there to spread it"),
        ([_seen(1, "allreduce_")], "Rank-local: rank 1 made it before the reduction, which then only spread it"),
        (
            [_seen(1, None).model_copy(update={"note": ANOMALY + "SqrtBackward0"})],
            "Rank-local: rank 1 made it in its own backward, which torch's anomaly mode ended before any reduction.",
        ),
    ],
    ids=["handed on", "alone", "reduced", "ended"],
)
def test_how_it_spread_is_said(findings: list[RankFinding], expected: str) -> None:
    """By the reduction, by what ranks exchange in the forward, or not at all."""
    incident = story.incident(
        attribution=Attribution.RANK_LOCAL, stage=Stage.PRE_REDUCE, suspect_ranks=(1,), findings=tuple(findings)
    )
    assert attribution_sentence(incident).startswith(expected)


def test_gradients_that_a_script_rewrote_were_not_spoilt_by_the_reduction() -> None:
    """Their stage is the reduction's, but it was finite: both sentences say "after"."""
    incident = story.incident(
        attribution=Attribution.RANK_LOCAL, stage=Stage.POST_REDUCE, suspect_ranks=(1,), rule="rewritten_gradient"
    )
    assert verdict_sentence(incident).endswith(" on rank 1, after the reduction.")
    assert attribution_sentence(incident) == "Rank-local: rank 1 made it after the reduction."


@pytest.mark.parametrize("kind", list(Kind))
def test_verdict_names_step_and_ranks(kind: Kind) -> None:
    """The verdict's sentence names the step and the suspect ranks, for every kind."""
    sentence = verdict_sentence(story.incident(kind=kind, suspect_ranks=(1, 3), step=41))
    assert sentence.startswith("At step 41, ")
    assert ("ranks 1 and 3 stopped: " if kind is Kind.RANK_SILENT else " on ranks 1 and 3, ") in sentence


@pytest.mark.parametrize(
    ("attribution", "stage", "ranks", "expected"),
    [
        (
            Attribution.RANK_LOCAL,
            Stage.PRE_REDUCE,
            (1,),
            "Rank-local: rank 1 made it before the reduction, which then only spread it",
        ),
        (
            Attribution.RANK_LOCAL,
            Stage.WIRE_CAST,
            (1,),
            "Rank-local: rank 1 made it in the cast to the dtype on the wire.",
        ),
        (Attribution.MULTI_RANK, Stage.PRE_REDUCE, (0, 2), "Several ranks: ranks 0 and 2 made it before the reduction"),
        (Attribution.ALL_RANKS, Stage.PRE_REDUCE, (0, 1), "All ranks alike"),
        (Attribution.REDUCTION_INDUCED, Stage.POST_REDUCE, (), "The reduction: what every rank put in was finite"),
        (Attribution.NONE, Stage.POST_REDUCE, (), "No single rank can be named."),
        (Attribution.NONE, Stage.OPTIMIZER, (0, 1), "No single rank can be named; ranks 0 and 1 concerned."),
    ],
)
def test_attribution_says_whose_fault(
    attribution: Attribution, stage: Stage, ranks: tuple[int, ...], expected: str
) -> None:
    """One sentence says whose fault it is and, where that is known, whose it is not."""
    incident = story.incident(attribution=attribution, stage=stage, suspect_ranks=ranks, findings=())
    sentence = attribution_sentence(incident)
    assert sentence.startswith(expected)
