"""Whose parts make a bundle, and when it is committed."""

from __future__ import annotations

from story import incident

from sentinel.incidents.events import CommitBundle, RequestParts
from sentinel.incidents.gathering import PARTS_SECONDS, PLANNED_SECONDS, Gathering
from sentinel.wire.messages import PartWritten


def part(rank: int, *, error: str = "", round_: int = 7) -> PartWritten:
    """Rank ``rank``'s part of the story's round."""
    return PartWritten(0, rank, round_, round_, 0, f"/run/rank-{rank:05d}", 10, 0.1, error)


def commits(gathering: Gathering, now: float = 1.0, *, ended: bool = False) -> list[CommitBundle]:
    """Bundles committed at ``now``."""
    return [c for c in gathering.commit_ready(now, 2, ended) if isinstance(c, CommitBundle)]


def test_an_incident_asks_for_the_parts_that_are_not_here() -> None:
    """Ranks that saw the fault wrote theirs unasked."""
    gathering = Gathering()
    gathering.part(part(1), 0.0)
    assert gathering.want(incident(), (0, 1, 2), 0.0) == RequestParts(0, 7, (0, 2))


def test_nothing_is_asked_for_when_all_parts_are_here() -> None:
    """Then the bundle is committed at once."""
    gathering = Gathering()
    gathering.part(part(0), 0.0)
    gathering.part(part(1), 0.0)
    assert gathering.want(incident(), (0, 1), 0.0) is None
    (commit,) = commits(gathering)
    assert (commit.bundle, commit.missing, commit.incidents) == ("a0-r000007", (), (incident().id,))
    assert [row[0] for row in commit.present] == [0, 1]


def test_a_bundle_waits_for_its_parts_until_the_deadline() -> None:
    """Then it is committed with what came, and says whose part is missing."""
    gathering = Gathering()
    gathering.want(incident(), (0, 1), 0.0)
    gathering.part(part(1), 1.0)
    assert commits(gathering, PARTS_SECONDS - 0.1) == []
    (commit,) = commits(gathering, PARTS_SECONDS)
    assert (commit.missing, [row[0] for row in commit.present]) == ((0,), [1])


def test_the_end_of_the_run_commits_what_is_there() -> None:
    """No more parts will come."""
    gathering = Gathering()
    gathering.want(incident(), (0, 1), 0.0)
    gathering.part(part(1), 0.0)
    assert [c.missing for c in commits(gathering, 0.1, ended=True)] == [(0,)]


def test_a_bundle_without_any_part_is_never_committed() -> None:
    """There is nothing a manifest could describe."""
    gathering = Gathering()
    gathering.want(incident(), (0, 1), 0.0)
    assert commits(gathering, 1e9, ended=True) == []


def test_a_bundle_is_committed_once_and_again_when_a_late_part_comes() -> None:
    """A partial bundle becomes whole."""
    gathering = Gathering()
    gathering.want(incident(), (0, 1), 0.0)
    gathering.part(part(1), 0.0)
    assert [c.missing for c in commits(gathering, PARTS_SECONDS)] == [(0,)]
    assert commits(gathering, PARTS_SECONDS + 1) == []
    gathering.part(part(0), PARTS_SECONDS + 2)
    assert [c.missing for c in commits(gathering, PARTS_SECONDS + 2)] == [()]


def test_a_part_that_could_not_be_written_is_present_and_missing() -> None:
    """Its error travels to the manifest; its rank is not whole."""
    gathering = Gathering()
    gathering.part(part(0, error="no space"), 0.0)
    gathering.part(part(1), 0.0)
    gathering.want(incident(), (0, 1), 0.0)
    (commit,) = commits(gathering)
    assert commit.missing == (0,)
    assert commit.present[0] == (0, 0, "/run/rank-00000", "no space")


def test_a_second_try_replaces_an_error_and_nothing_replaces_a_part() -> None:
    """The written part stays."""
    gathering = Gathering()
    gathering.part(part(0, error="no space"), 0.0)
    gathering.part(part(0), 0.0)
    gathering.part(part(0, error="late complaint"), 0.0)
    gathering.want(incident(), (0,), 0.0)
    (commit,) = commits(gathering)
    assert commit.present == ((0, 0, "/run/rank-00000", ""),)


def test_parts_of_a_round_without_incident_are_committed_as_they_are() -> None:
    """Ranks wrote them before the verdict was known."""
    gathering = Gathering()
    gathering.part(part(1), 0.0)
    assert commits(gathering) == []
    gathering.unwanted(0, 7, 0.0)
    (commit,) = commits(gathering)
    assert (commit.incidents, commit.missing) == ((), ())


def test_a_quiet_round_with_no_parts_makes_no_bundle() -> None:
    """Ordinary skips leave nothing behind."""
    gathering = Gathering()
    gathering.unwanted(0, 7, 0.0)
    assert commits(gathering, 1e9, ended=True) == []


def test_a_rank_is_waited_for_until_its_part_came() -> None:
    """It must not exit while its part is wanted."""
    gathering = Gathering()
    gathering.want(incident(), (0, 1), 0.0)
    gathering.part(part(1), 0.0)
    assert gathering.waits_for(0)
    assert not gathering.waits_for(1)
    assert not gathering.waits_for(5)


def test_two_incidents_of_one_round_share_its_bundle() -> None:
    """One round, one bundle."""
    gathering = Gathering()
    gathering.part(part(0), 0.0)
    gathering.want(incident(), (0,), 0.0)
    gathering.want(incident(id="a0-r000007-02"), (0,), 0.0)
    (commit,) = commits(gathering)
    assert commit.incidents == (incident().id, "a0-r000007-02")
    assert dict(gathering.committed([commit])) == {"bundles/a0-r000007": commit.incidents}


def test_bundles_of_two_attempts_are_two() -> None:
    """Round 7 of the second attempt is another round."""
    gathering = Gathering()
    gathering.part(part(0), 0.0)
    gathering.want(incident(attempt=1), (0,), 0.0)
    assert commits(gathering) == []


def test_a_planned_bundle_waits_longer() -> None:
    """A round that is still to come is waited for; all its parts make a bundle of no incident, dated by the parts."""
    gathering = Gathering()
    assert gathering.plan(0, 9, (0, 1), 0.0) == RequestParts(0, 9, (0, 1))
    gathering.part(PartWritten(0, 0, 9, 4, 0, "/run/rank-00000", 10, 0.1, ""), PARTS_SECONDS + 1)
    assert commits(gathering, PLANNED_SECONDS - 1) == []
    gathering.part(PartWritten(0, 1, 9, 4, 0, "/run/rank-00001", 10, 0.1, ""), PLANNED_SECONDS - 1)
    (commit,) = commits(gathering, PLANNED_SECONDS - 1)
    assert (commit.bundle, commit.step, commit.missing, commit.incidents) == ("a0-r000009", 4, (), ())
