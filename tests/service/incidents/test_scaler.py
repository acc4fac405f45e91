"""The scaler's memory: which skips the search for a scale explains."""

from __future__ import annotations

from service.incidents.rounds import Round

from sentinel.incidents.scaler import MAX_CONSECUTIVE_SKIPS, ScalerHistory
from sentinel.wire.messages import ClosedBy


def history(*rounds: tuple[float | None, bool]) -> ScalerHistory:
    """Memory after rounds of (scale, skipped)."""
    made = ScalerHistory()
    for scale, skipped in rounds:
        by = ClosedBy.SCALER_SKIP if skipped else ClosedBy.OPTIMIZER
        made.note(Round(1).closed(by, skipped=skipped, loss_scale=scale).closings()[0])
    return made


def test_nothing_stepped_yet_explains_any_skip() -> None:
    """The first scale is a guess."""
    assert history().explains(65536.0)
    assert history((65536.0, True), (32768.0, True)).explains(16384.0)


def test_a_skip_at_the_scale_that_stepped_before_is_not_explained() -> None:
    """The scale did well a round ago."""
    assert not history((1024.0, False)).explains(1024.0)
    assert not history((1024.0, False)).explains(512.0)


def test_a_growth_explains_the_skips_that_follow_it() -> None:
    """The scale doubled, then had to halve twice: one search."""
    assert history((1024.0, False)).explains(2048.0)
    assert history((1024.0, False), (2048.0, True)).explains(1024.0)


def test_an_unexplained_skip_does_not_excuse_the_next() -> None:
    """A second skip in a row belongs to whatever made the first."""
    assert not history((1024.0, False), (1024.0, True)).explains(512.0)


def test_a_step_ends_the_search() -> None:
    """After a step, skips count from one again."""
    settled = history((65536.0, True), (32768.0, True), (16384.0, False))
    assert settled.consecutive_skips == 0
    assert not settled.explains(16384.0)


def test_rounds_without_a_scaler_teach_nothing() -> None:
    """A framework's skip has no scale."""
    assert history((None, True), (None, False)) == ScalerHistory()


def test_halving_reaches_a_sixteenth_within_the_limit() -> None:
    """The limit is what a search from 2**16 can need."""
    assert 2.0**16 / 2**MAX_CONSECUTIVE_SKIPS == 1 / 16
