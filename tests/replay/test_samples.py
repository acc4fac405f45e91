"""The search for samples, against a predicate that knows the answer."""

from __future__ import annotations

import random

import pytest

from sentinel_agent.replay.samples import MAX_QUESTIONS, Blamed, Fails, bisect, confirm


def fails_with(guilty: set[int], asked: list[int] | None = None) -> Fails:
    """The step fails as long as a guilty sample is in the batch, in its own place or put in another's."""

    def fails(replaced: tuple[int, ...], by: int) -> bool:
        if asked is not None:
            asked.append(by)
        return bool(guilty - set(replaced)) or (by in guilty and bool(replaced))

    return fails


@pytest.mark.parametrize("seed", range(20))
def test_one_or_two_guilty_samples_are_found(seed: int) -> None:
    """Bisection finds exactly the planted samples of a batch of 64, whichever they are, within its questions."""
    chosen = random.Random(seed)
    guilty = set(chosen.sample(range(64), 1))
    asked: list[int] = []
    blamed = bisect(64, fails_with(guilty, asked))
    print(f"seed {seed}: {sorted(guilty)}")
    assert set(blamed.samples) == guilty
    assert blamed.confirmed
    assert len(asked) <= MAX_QUESTIONS


def test_the_good_sample_may_be_guilty_itself() -> None:
    """If the first candidate for a good sample is guilty, another is taken."""
    assert bisect(16, fails_with({0})) == Blamed((0,), True)


def test_nothing_is_blamed_if_every_sample_fails() -> None:
    """A step that fails whatever is in the batch has no guilty samples."""
    assert bisect(8, lambda replaced, by: True) == Blamed()


def test_a_batch_that_only_fails_as_a_whole_blames_no_one() -> None:
    """If no part of the batch fails alone, no sample is named."""
    assert bisect(4, lambda replaced, by: len(replaced) == 0) == Blamed()


def test_rows_are_confirmed_by_replacing_them() -> None:
    """Rows of the first bad op are confirmed if the step is finite without them, and not if it still fails."""
    assert confirm((3,), 8, fails_with({3})) == Blamed((3,), True)
    assert confirm((3,), 8, fails_with({3, 4})) == Blamed((3,), False)
    assert confirm(tuple(range(8)), 8, fails_with({3})) == Blamed()
    assert confirm((3,), 8, lambda replaced, by: None) == Blamed((3,), None)
