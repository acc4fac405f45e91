"""The window: which micro-batches are kept, for which round, and what gives way when it is full."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sentinel_agent.capture import Drop
from sentinel_agent.rng import restore
from sentinel_agent.window import MAX_PENDING, MAX_PENDING_BLIND, Window


def _batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8), torch.arange(rows)


def test_entries_are_sealed_under_their_round() -> None:
    """What was caught before close_round(n) belongs to n; the open round can be asked for too."""
    window = Window(rounds=2)
    window.loader_batch(_batch())
    window.close_round(0)
    window.loader_batch(_batch())
    window.loader_batch(_batch())
    assert len(window.entries(0)) == 1
    assert len(window.entries(1)) == 2
    window.close_round(1)
    assert len(window.entries(1)) == 2
    assert window.entries(7) == ()


def test_only_the_last_rounds_are_kept() -> None:
    """The oldest round leaves when one more is sealed, and its bytes with it."""
    window = Window(rounds=2)
    for number in range(5):
        window.loader_batch(_batch())
        window.close_round(number)
    assert window.rounds() == (3, 4)
    assert window.entries(2) == ()
    assert window.bytes_held == 2 * (4 * 8 * 4 + 4 * 8)


def test_forward_shares_the_loader_s_tensors() -> None:
    """A forward that is given the very tensors of the batch refers to them, and knows their sample indices."""
    window = Window()
    x, y = _batch()
    window.loader_batch((x, y), [5, 6, 7, 8])
    before = window.bytes_held
    window.forward_inputs((x,), {})
    loader, forward = window.entries(0)
    assert forward.captured.held[0] is loader.captured.held[0]
    assert window.bytes_held == before
    assert forward.sample_indices == (5, 6, 7, 8)


def test_a_batch_changed_before_the_forward_is_caught_again() -> None:
    """If the script changed the tensor in place in between, the forward's own contents are kept as well."""
    window = Window()
    x, y = _batch()
    window.loader_batch((x, y))
    x.mul_(2)
    window.forward_inputs((x,), {})
    loader, forward = window.entries(0)
    assert torch.equal(forward.captured.held[0].tensor, x)
    assert not torch.equal(loader.captured.held[0].tensor, x)


def test_a_new_tensor_at_an_old_address_is_not_taken_for_the_old_one() -> None:
    """Identity is checked against the live object, not its id: a later tensor is captured on its own."""
    window = Window()
    for _ in range(20):
        window.loader_batch((torch.full((4,), 1.0),))
        fresh = torch.full((4,), 2.0)  # often gets the freed batch's id
        window.forward_inputs((fresh,), {})
        assert torch.equal(window.entries(0)[-1].captured.held[0].tensor, fresh)
        del fresh


def test_keyword_inputs_are_kept() -> None:
    """Keyword arguments of the forward are captured beside the positional ones."""
    window = Window()
    window.forward_inputs((torch.ones(1),), {"mask": torch.zeros(1)})
    tree = window.entries(0)[0].captured.tree
    assert tree.keys == ("args", "kwargs")
    assert len(window.entries(0)[0].captured.held) == 2


def test_a_forward_without_gradients_is_not_kept() -> None:
    """Evaluation leaves no forward entry."""
    window = Window()
    with torch.no_grad():
        window.forward_inputs((torch.ones(1),), {})
    assert window.entries(0) == ()


def test_an_evaluation_loop_does_not_push_out_training_batches() -> None:
    """Batches that only forwards without gradients used are discarded as the loop goes on."""
    window = Window()
    train = _batch()
    window.loader_batch(train, [1])
    window.forward_inputs((train[0],), {})
    for _ in range(50):
        batch = _batch()
        window.loader_batch(batch, [9])
        with torch.no_grad():
            window.forward_inputs((batch[0] + 0,), {})
    window.loader_batch(_batch(), [2])
    assert [entry.sample_indices for entry in window.entries(0)] == [(1,), (1,), (2,)]
    assert window.drops[Drop.EVALUATION_BATCH] == 50


def test_a_batch_used_without_and_then_with_gradients_is_kept() -> None:
    """A generator's forward without gradients before the training forward does not cost the batch."""
    window = Window()
    window.loader_batch(_batch(), [3])
    with torch.no_grad():
        window.forward_inputs((torch.ones(2),), {})
    window.forward_inputs((torch.ones(2),), {})
    window.loader_batch(_batch(), [4])
    assert [entry.sample_indices for entry in window.entries(0)] == [(3,), None, (4,)]


@pytest.mark.parametrize(("forward_seen", "limit"), [(True, MAX_PENDING), (False, MAX_PENDING_BLIND)])
def test_batches_that_nothing_uses_are_limited(forward_seen: bool, limit: int) -> None:
    """A loader that is only iterated keeps its last few batches; more where no root is watched at all."""
    window = Window()
    if forward_seen:
        window.forward_inputs((torch.ones(1),), {})
        window.close_round(0)
    for number in range(limit + 5):
        window.loader_batch(_batch(), [number])
    kept = window.entries(1 if forward_seen else 0)
    assert [entry.sample_indices for entry in kept] == [(n,) for n in range(5, limit + 5)]
    assert window.drops[Drop.UNUSED_BATCH] == 5


def test_the_oldest_tensors_give_way_at_the_byte_cap() -> None:
    """Over the cap the oldest entry loses its tensors, counted, but keeps structure and indices."""
    one = 1000 * 4
    window = Window(byte_cap=2 * one)
    for number in range(3):
        window.loader_batch((torch.randn(1000),), [number])
    first, second, third = window.entries(0)
    assert first.captured.held == ()
    assert first.sample_indices == (0,)
    assert len(second.captured.held) == len(third.captured.held) == 1
    assert window.bytes_held == 2 * one
    assert window.drops[Drop.BYTE_CAP] == 1


def test_a_batch_over_the_cap_does_not_empty_the_ring() -> None:
    """A batch that could never fit is released itself."""
    window = Window(byte_cap=10_000)
    window.loader_batch((torch.randn(1000),), [1])
    window.loader_batch((torch.randn(10_000),), [2])
    first, second = window.entries(0)
    assert len(first.captured.held) == 1
    assert second.captured.held == ()


def test_bytes_of_shared_tensors_count_once_and_end_at_zero() -> None:
    """After everything left the ring, no byte is held and no tensor remembered."""
    window = Window(rounds=1)
    for number in range(3):
        x, y = _batch()
        window.loader_batch((x, y))
        window.forward_inputs((x,), {"y": y})
        window.close_round(number)
    window.close_round(3)
    assert window.bytes_held == 0
    assert window._known == {}


def test_a_prefetched_batch_is_recognised_in_the_next_round() -> None:
    """A wrapper that fetches one batch ahead: the forward after the step still finds its indices."""
    window = Window()
    ahead = _batch()
    window.loader_batch(ahead, [42])
    window.close_round(0)
    window.forward_inputs((ahead[0],), {})
    assert window.entries(1)[0].sample_indices == (42,)


def test_hand_made_inputs_can_be_drawn_again() -> None:
    """The state at the end of the previous round brings back what the script drew by hand, from every generator."""
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    window = Window()
    window.close_round(0)
    x = torch.randn(4, generator=None) * random.random() + float(np.random.randn())
    window.forward_inputs((x,), {})
    window.close_round(1)
    restore(window.entries(1)[0].round_rng)
    again = torch.randn(4) * random.random() + float(np.random.randn())
    assert torch.equal(again, x)


def test_loader_rng_is_the_state_before_the_batch_was_made() -> None:
    """A batch augmented at random while it was made is made again from the entry's state."""
    torch.manual_seed(11)
    window = Window()
    rng = window.before_batch()
    batch = torch.rand(3)
    torch.rand(7)
    window.loader_batch(batch, rng=rng)
    restore(window.entries(0)[0].rng)
    assert torch.equal(torch.rand(3), batch)


def test_another_thread_reads_a_consistent_snapshot() -> None:
    """Entries read while training goes on are whole tuples that later changes do not touch."""
    window = Window(rounds=2, byte_cap=20_000)
    stop = threading.Event()

    def read() -> int:
        looked_at = 0
        while not stop.is_set():
            for number in window.rounds():
                for entry in window.entries(number):
                    looked_at += sum(held.tensor.numel() for held in entry.captured.held)
        return looked_at

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        try:
            for number in range(300):
                x, y = _batch()
                window.loader_batch((x, y), [number])
                window.forward_inputs((x,), {})
                window.close_round(number)
        finally:
            stop.set()
        assert reading.result(timeout=10) > 0
