"""The scaler's memory: which skips the search for a scale explains."""

from __future__ import annotations

from service.incidents.rounds import INF, Round, World

from sentinel.incidents.model import Kind, Severity
from sentinel.incidents.scaler import MAX_CONSECUTIVE_SKIPS, ScalerHistory
from sentinel.wire.messages import ClosedBy, Phase


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


# --- in the life of a run -------------------------------------------------------------------------------------------------


def test_a_settling_scaler_is_counted_and_opens_nothing() -> None:
    """Sixteen skips at the start, then training."""
    world = World(2)
    for halvings in range(16):
        told = world.round().nan_gradient(0, 1, found=INF).scaler_skip(2.0 ** (16 - halvings))
        assert world.tell(told) == []
    world.healthy(5, scale=1.0)
    assert world.incidents == []
    assert world.tracker.counts.benign_skips == 16


def test_a_scaler_that_never_settles_is_an_incident() -> None:
    """After twenty skips in a row the scale is not the reason; the incident is dated to the first of them."""
    world = World(2)
    world.healthy(2, scale=65536.0)
    for halvings in range(22):
        world.tell(world.round().nan_gradient(1, found=INF).scaler_skip(2.0 ** (16 - halvings)))
    first = world.incidents[0]
    assert (first.kind, first.round, first.step) == (Kind.SCALER_COLLAPSE, 2, 2)


def test_a_scaler_that_never_settles_is_one_incident() -> None:
    """The skips that go on after the collapse was told are the same story."""
    world = World(2)
    for halvings in range(30):
        world.tell(world.round().nan_gradient(0, 1, found=INF).scaler_skip(2.0 ** (16 - halvings)))
    assert [i.kind for i in world.incidents] == [Kind.SCALER_COLLAPSE]


def test_a_scaler_that_skips_echoes_has_not_collapsed() -> None:
    """Parameters are nonfinite since round 5; that no scale helps is its consequence and updates that incident."""
    world = World(2)
    world.healthy(5, scale=1024.0)
    world.tell(world.round().nan_gradient(1).closed(loss_scale=1024.0))
    for _ in range(25):
        echo = world.round().nan_gradient(0, 1).saw(Phase.PARAMS).scaler_skip(512.0)
        world.tell(echo.closed(ClosedBy.SCALER_SKIP, params_nonfinite=True))
    assert [i.kind for i in world.incidents] == [Kind.NONFINITE_GRADIENT]


def test_nan_in_mid_run_is_an_incident_though_the_scaler_skips_it() -> None:
    """The scale did well before, and nothing overflowed."""
    world = World(2)
    world.healthy(5, scale=1024.0)
    world.tell(world.round().nan_gradient(1).scaler_skip(1024.0))
    assert (world.incident.suspect_ranks, world.incident.severity) == ((1,), Severity.CRITICAL)
