"""Bundles and goodbyes, as the tracker orders them: request, commit, attach, release."""

from __future__ import annotations

from service.incidents.rounds import World, saved

from sentinel.incidents.events import Command, CommitBundle, Release, RequestParts, RunEnded, SaveIncident
from sentinel.incidents.gathering import PARTS_SECONDS
from sentinel.incidents.tracker import JUDGE_SECONDS, RELEASE_SECONDS


def kinds(commands: list[Command]) -> list[str]:
    """Names of the commands, in order."""
    return [type(command).__name__ for command in commands]


def released(commands: list[Command]) -> list[int]:
    """Ranks let go by ``commands``."""
    return [rank for c in commands if isinstance(c, Release) for rank in c.ranks]


def incident_at_round_2(size: int = 2) -> World:
    """A world whose rank 1 made NaN in round 2; no part is written yet."""
    world = World(size)
    world.hello()
    world.healthy(2)
    world.tell(world.round().nan_gradient(1))
    return world


def test_commands_come_in_the_order_they_must_be_done() -> None:
    """The incident is stored before parts are asked for; the bundle is committed before its path is stored."""
    world = World(2)
    world.hello()
    told = world.round().nan_gradient(1)
    assert kinds(world.tell(told)) == ["SaveIncident", "RequestParts"]
    assert kinds(world.feed(world.part(0, 0), world.part(1, 0))) == ["CommitBundle", "SaveIncident"]


def test_the_incident_learns_the_path_of_its_bundle() -> None:
    """Relative to the run directory."""
    world = incident_at_round_2()
    assert world.incident.bundle is None
    world.feed(world.part(0, 2), world.part(1, 2))
    assert world.incident.bundle == "bundles/a0-r000002"


def test_a_bundle_names_its_round_and_world() -> None:
    """What the manifest needs is in the command."""
    world = incident_at_round_2(3)
    world.feed(*(world.part(rank, 2) for rank in (0, 1)))
    (commit,) = (c for c in world.feed(world.part(2, 2)) if isinstance(c, CommitBundle))
    assert (commit.round, commit.step, commit.world_size, commit.attempt) == (2, 2, 3, 0)
    assert (commit.missing, commit.incidents) == ((), (world.incident.id,))


def test_a_bundle_is_committed_as_partial_at_its_deadline() -> None:
    """Time comes in with the event; a tick is enough."""
    world = incident_at_round_2()
    world.feed(world.part(1, 2))
    (commit,) = (c for c in world.wait(PARTS_SECONDS + 1) if isinstance(c, CommitBundle))
    assert commit.missing == (0,)


def test_a_late_part_is_committed_without_storing_the_path_again() -> None:
    """The path does not change."""
    world = incident_at_round_2()
    world.feed(world.part(1, 2))
    world.wait(PARTS_SECONDS + 1)
    assert kinds(world.feed(world.part(0, 2))) == ["CommitBundle"]


def test_an_echo_asks_for_no_parts() -> None:
    """Its state is lost already; the origin is on disk."""
    world = incident_at_round_2()
    commands = world.tell(world.round().nan_gradient(0, 1).closed(params_nonfinite=True))
    assert not any(isinstance(c, RequestParts) for c in commands)


def test_parts_that_came_before_the_verdict_are_not_committed_early() -> None:
    """Until the round is judged nobody knows whose parts are wanted."""
    world = World(2)
    world.hello()
    told = world.round().nan_gradient(1)
    early = world.feed(*told.evidence(), world.part(1, 0), *told.closings(1))
    assert kinds(early) == []
    assert kinds(world.feed(*told.closings(0))) == ["SaveIncident", "RequestParts"]


def test_parts_of_a_quiet_round_are_committed_without_an_incident() -> None:
    """Somebody wrote them; they are kept and belong to nobody."""
    world = World(2)
    told = world.round().nan_gradient(1).scaler_skip(65536.0)
    commands = world.feed(world.part(1, 0), *told.reports())
    (commit,) = (c for c in commands if isinstance(c, CommitBundle))
    assert commit.incidents == ()


def test_the_end_of_the_run_commits_and_stores() -> None:
    """Also for a round that is judged only then."""
    world = World(2)
    world.hello()
    told = world.round().nan_gradient(1)
    world.feed(*told.evidence(), world.part(1, 0))
    done = [name for name in kinds(world.feed(RunEnded())) if name != "RequestParts"]  # nobody is left to be asked
    assert done == ["SaveIncident", "CommitBundle", "SaveIncident"]
    assert world.incident.bundle == "bundles/a0-r000000"


# --- goodbyes ------------------------------------------------------------------------------------------------------------


def test_a_rank_is_let_go_when_its_rounds_are_judged() -> None:
    """Everybody closed the last round, nothing is open."""
    world = World(2)
    world.hello()
    world.healthy(3)
    assert world.feed(world.goodbye(0, 2)) == [Release(0, (0,))]
    assert world.feed(world.goodbye(1, 2)) == [Release(0, (1,))]


def test_a_rank_waits_while_others_have_not_closed_its_last_round() -> None:
    """Its reports may be needed to judge it."""
    world = World(2)
    world.hello()
    world.healthy(2)
    told = world.round()
    world.feed(*told.closings(0))
    assert world.feed(world.goodbye(0, 2)) == []
    assert released(world.feed(*told.closings(1))) == [0]


def test_a_rank_waits_while_evidence_of_its_rounds_is_open() -> None:
    """The verdict may ask for its part."""
    world = World(2)
    world.hello()
    told = world.round().nan_gradient(1)
    world.feed(*told.evidence(), *told.closings(0))
    assert world.feed(world.goodbye(0, 0)) == []


def test_a_rank_waits_until_its_part_is_written() -> None:
    """Only its own part."""
    world = incident_at_round_2()
    world.feed(world.part(1, 2))
    assert released(world.feed(world.goodbye(1, 2))) == [1]
    assert released(world.feed(world.goodbye(0, 2))) == []
    assert released(world.feed(world.part(0, 2))) == [0]


def test_nobody_waits_longer_than_the_promise() -> None:
    """Whatever is open, a training process ends."""
    world = World(2)
    world.hello()
    told = world.round().nan_gradient(1)
    world.feed(*told.evidence(), *told.closings(1), world.goodbye(1, 0))
    assert released(world.wait(RELEASE_SECONDS - 0.01)) == []
    assert released(world.wait(0.02)) == [1]


def test_a_rank_is_let_go_once() -> None:
    """One goodbye, one release."""
    world = World(2)
    world.hello()
    world.healthy(1)
    world.feed(world.goodbye(0, 0))
    assert world.wait(10.0) == []


def test_a_rank_that_left_in_mid_round_gives_its_evidence_and_is_not_waited_for() -> None:
    """It closed the round by its exit; the others never will."""
    world = World(2)
    world.hello()
    world.healthy(2)
    told = world.round().raw(1)
    world.feed(*told.evidence(), *told.closings(1), world.goodbye(1, 2), world.node_ended(0))
    world.wait(JUDGE_SECONDS + 1)
    assert world.incident.suspect_ranks == (1,)
    assert [c for c in saved(world.feed(RunEnded())) if isinstance(c, SaveIncident) and c.is_new] == []
