"""Which ranks a run has, and how each is doing."""

from __future__ import annotations

import pytest

from sentinel.incidents.roster import SILENT_AFTER_SECONDS, RankCondition, Roster
from sentinel.wire.messages import ClosedBy, Counted, Disabled, Goodbye, Hello, NodeEnded, Report, RoundClosed


def hello(rank: int, *, attempt: int = 0, node: int = 0, world_size: int = 4) -> Hello:
    """Rank ``rank`` is up."""
    return Hello(attempt, rank, rank, node, world_size, 1, "host", "0", "2", 0.0)


def closed(rank: int, round_: int, attempt: int = 0) -> RoundClosed:
    """Rank ``rank`` closed a round."""
    return RoundClosed(attempt, rank, round_, round_, ClosedBy.OPTIMIZER, 0.0, 0, 1)


def roster(*reports: Report, now: float = 0.0) -> Roster:
    """A roster that took in ``reports``."""
    made = Roster()
    for report in reports:
        made.note(report, now)
    return made


def test_a_hello_says_how_many_ranks_there_are() -> None:
    """Before any hello nothing is expected but who was heard."""
    assert roster(closed(3, 0)).expected(0) == [3]
    assert roster(hello(3)).expected(0) == [0, 1, 2, 3]


def test_a_rank_that_left_is_expected_up_to_its_last_round() -> None:
    """Goodbye names the last closed round."""
    made = roster(hello(0), Goodbye(0, 1, last_round=5, clean=True))
    assert 1 in made.expected(5)
    assert 1 not in made.expected(6)
    assert made.present() == 3


def test_a_closing_after_goodbye_does_not_bring_a_rank_back() -> None:
    """Samples may be overtaken by what is critical."""
    made = roster(hello(0), closed(1, 4), Goodbye(0, 1, last_round=5, clean=True), closed(1, 5))
    assert made.ranks[1].state is RankCondition.ENDED
    assert made.ranks[1].left_at_round == 5


def test_a_disabled_agent_is_not_awaited() -> None:
    """Its rank goes on training unseen."""
    made = roster(hello(0), closed(1, 4), Disabled(0, 1, "faults"))
    assert made.ranks[1].state is RankCondition.DISABLED
    assert 1 not in made.expected(5)
    assert 1 in made.concerned(5)
    assert 1 in made.expected(4)


def test_ranks_of_an_ended_node_leave_at_their_last_round() -> None:
    """Only that node's ranks, and only those of that attempt."""
    made = roster(hello(0), hello(1, node=1), closed(1, 7), NodeEnded(0, 1, exit_code=1))
    assert made.ranks[1].left_at_round == 7
    assert made.ranks[0].state is RankCondition.RUNNING


def test_the_end_of_an_old_attempts_node_leaves_the_new_attempt_alone() -> None:
    """A launcher may say so after its restarted ranks have said hello."""
    made = roster(hello(0), hello(0, attempt=1), NodeEnded(0, 0, exit_code=1))
    assert made.ranks[0].state is RankCondition.RUNNING


def test_a_new_attempt_starts_over_and_may_be_smaller() -> None:
    """Elastic training restarts with the nodes that are left."""
    made = roster(hello(0), Goodbye(0, 3, last_round=2, clean=False), hello(0, attempt=1, world_size=2))
    assert (made.attempt, made.world_size, sorted(made.ranks)) == (1, 2, [0])
    assert made.expected(0) == [0, 1]


def test_reports_of_an_older_attempt_change_nothing() -> None:
    """They come late, from processes that are gone."""
    made = roster(hello(0, attempt=1), Goodbye(0, 0, last_round=9, clean=True), hello(1, world_size=64))
    assert (made.world_size, sorted(made.ranks)) == (4, [0])
    assert made.ranks[0].state is RankCondition.RUNNING


def test_a_relays_counts_are_no_rank() -> None:
    """Rank -1 stands for a relay."""
    assert roster(Counted(0, -1, 0, {}, {})).ranks == {}


def test_silence_is_noticed_and_forgiven() -> None:
    """A minute without a report is silence; the next report ends it."""
    made = roster(hello(0), hello(1))
    for second in range(int(SILENT_AFTER_SECONDS) + 1):
        made.tick(float(second))
    assert [made.ranks[rank].state for rank in (0, 1)] == [RankCondition.RUNNING, RankCondition.RUNNING]
    made.tick(SILENT_AFTER_SECONDS + 1)
    assert [made.ranks[rank].state for rank in (0, 1)] == [RankCondition.SILENT, RankCondition.SILENT]
    assert made.expected(0) == [0, 1, 2, 3]
    made.note(closed(0, 1), SILENT_AFTER_SECONDS + 2)
    assert [made.ranks[rank].state for rank in (0, 1)] == [RankCondition.RUNNING, RankCondition.SILENT]


def test_who_did_not_listen_calls_nobody_silent() -> None:
    """After a pause of the ticks themselves the minute begins anew."""
    made = roster(hello(0))
    made.tick(1.0)
    made.tick(1e6)
    assert made.ranks[0].state is RankCondition.RUNNING


@pytest.mark.parametrize("last", [Goodbye(0, 0, last_round=1, clean=True), Disabled(0, 0, "faults")])
def test_a_rank_that_left_is_never_silent(last: Report) -> None:
    """Nothing is expected of it."""
    made = roster(hello(0), last)
    for second in range(1000):
        made.tick(float(second))
    assert made.ranks[0].state is not RankCondition.SILENT


def test_at_the_end_every_rank_has_left() -> None:
    """Each at the last round it closed."""
    made = roster(hello(0), closed(0, 6), hello(1))
    made.end_all()
    assert [made.ranks[rank].left_at_round for rank in (0, 1)] == [6, -1]


def test_rounds_and_steps_are_the_newest() -> None:
    """Rounds only go up."""
    made = roster(closed(0, 6), closed(0, 4))
    assert made.ranks[0].last_round == 6


def test_an_older_round_that_comes_late_does_not_turn_the_step_back() -> None:
    """Status shows the step of the newest round."""
    assert roster(closed(0, 6), closed(0, 4)).ranks[0].step == 6
