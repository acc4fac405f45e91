"""RNG states: what is drawn after a restore is what was drawn after the snapshot."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sentinel_agent import rng
from sentinel_agent.rng import as_tensors, from_tensors, restore, snapshot


def _draws() -> list[float]:
    return [
        torch.rand(1).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def test_restores_every_generator_through_tensors() -> None:
    """A state that went through named tensors brings back the same draws of torch, random and numpy."""
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    state = snapshot()
    expected = _draws()
    restore(from_tensors(as_tensors(state)))
    assert _draws() == expected


def test_keeps_the_cached_second_normal_deviate() -> None:
    """After an odd number of normal draws, the cached deviates of random and numpy are part of the state."""
    np.random.seed(2)
    random.seed(3)
    np.random.randn(), random.gauss(0, 1)
    state = snapshot()
    expected = (np.random.randn(), random.gauss(0, 1))
    restore(from_tensors(as_tensors(state)))
    assert (np.random.randn(), random.gauss(0, 1)) == expected


def test_notices_that_a_cached_deviate_was_consumed() -> None:
    """Using up numpy's cached deviate leaves its memory as it was, and still the next snapshot differs."""
    np.random.seed(2)
    np.random.randn()
    first = snapshot()
    np.random.randn()
    second = snapshot()
    assert first.numpy is not None
    assert second.numpy is not None
    assert (first.numpy["has_gauss"], second.numpy["has_gauss"]) == (1, 0)


def test_reuses_numpy_state_only_while_nothing_was_drawn() -> None:
    """Two snapshots without a draw share numpy's state; one draw, or a new bit generator, makes a new one."""
    np.random.seed(7)
    first, second = snapshot(), snapshot()
    assert first.numpy is second.numpy
    np.random.rand()
    third = snapshot()
    assert third.numpy is not second.numpy
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.MT19937(5))
        fresh = snapshot()
    finally:
        np.random.set_bit_generator(original)
    assert fresh.numpy is not None
    assert third.numpy is not None
    assert not np.array_equal(fresh.numpy["state"]["key"], third.numpy["state"]["key"])


def test_another_bit_generator_than_the_usual_is_left_out() -> None:
    """A numpy generator whose state we cannot name as words is absent, and the rest is still there."""
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        state = snapshot()
    finally:
        np.random.set_bit_generator(original)
    assert state.numpy is None
    assert set(as_tensors(state)) >= {"torch", "python"}


def test_a_snapshot_draws_nothing() -> None:
    """Taking states changes no generator."""
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    expected = _draws()
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    snapshot()
    assert _draws() == expected


def test_reuses_python_state_only_while_nothing_was_drawn() -> None:
    """Two snapshots without a draw share the state of ``random``; a draw, or a cached deviate used up, makes a new one."""
    random.seed(11)
    first, second = snapshot(), snapshot()
    assert first.python is second.python
    random.random()
    third = snapshot()
    assert third.python == random.getstate() != second.python
    random.gauss(0, 1)
    fourth = snapshot()
    random.gauss(0, 1)  # the second of the pair: the words stay as they were
    fifth = snapshot()
    assert fourth.python[1] == fifth.python[1]
    assert fourth.python[2] is not None
    assert fifth.python == random.getstate()
    assert fifth.python[2] is None


def test_reads_python_state_in_full_where_its_memory_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that lays a generator out in another way gets a full read each time."""
    random.seed(11)
    monkeypatch.setattr(rng._python, "_address", 0)
    assert snapshot().python == random.getstate()
    random.random()
    assert snapshot().python == random.getstate()
