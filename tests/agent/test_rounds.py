"""What one open round remembers."""

from __future__ import annotations

from sentinel_agent.rounds import Round


def test_collectives_are_numbered_by_group() -> None:
    """The k-th collective of a group has number k, whatever happens on other groups."""
    round_ = Round(3)
    assert [round_.next_index(group) for group in "aabab"] == [0, 1, 0, 2, 1]


def test_a_round_without_evidence_is_not_suspicious() -> None:
    """Evidence makes a round suspicious, and nothing else does."""
    round_ = Round(0, dirty=True, synced=True, loss=1.0)
    assert not round_.suspicious
    round_.evidence = 1
    assert round_.suspicious
