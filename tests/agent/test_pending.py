"""Checks of results finish before anybody can write what they read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from relay_client import wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel.wire.messages import Check, Role
from sentinel_agent import pending as pending_module
from sentinel_agent.errors import Health
from sentinel_agent.pending import Pending, written_since
from sentinel_agent.rounds import Reduction


class Slow:
    """A collective's work, done when the test says so."""

    def __init__(self, *, fails: bool = False, futureless: bool = False) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.waits = 0
        self._fails = fails
        self._futureless = futureless

    def is_completed(self) -> bool:
        """Is it done?"""
        return self.future.done()

    def wait(self) -> None:
        """Wait for it, or fail as torch would."""
        self.waits += 1
        if self._fails:
            raise RuntimeError("Connection closed by peer")
        if not self._futureless:
            self.future.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Its future, which some backends lack."""
        if self._futureless:
            raise RuntimeError("Work::getFuture not implemented.")
        return self.future


def _reduction(work: Any) -> Reduction:
    check = Check(1, 0, 0, 1.0)
    return Reduction("allreduce_", "0", (), 0, "SUM", "float32", Role.GRADIENT, check, work=work)


@pytest.fixture
def finished() -> list[Reduction]:
    """Reductions that were looked at."""
    return []


@pytest.fixture
def pending(finished: list[Reduction]) -> Pending:
    """Pending checks that only note what they look at."""
    return Pending(finished.append, Health(0, lambda _reason: None))


def test_now_waits_and_looks(pending: Pending, finished: list[Reduction]) -> None:
    """A caller that waits at once has its result looked at before the call returns."""
    work = Slow()
    work.future.set_result([])
    pending.now(reduction := _reduction(work))
    assert finished == [reduction]
    assert work.waits == 1


def test_a_result_is_looked_at_when_it_arrives(pending: Pending, finished: list[Reduction]) -> None:
    """The look happens in the completion's own callback; a join after it does not look twice."""
    work = Slow()
    pending.when_complete(reduction := _reduction(work))
    assert finished == []
    work.future.set_result([])
    assert finished == [reduction]
    pending.join()
    assert finished == [reduction]


def test_join_waits_for_what_is_outstanding(pending: Pending, finished: list[Reduction]) -> None:
    """A join returns only after the last result was looked at."""
    work = Slow()
    pending.when_complete(reduction := _reduction(work))
    joined = threading.Thread(target=pending.join)
    joined.start()
    wait_until(lambda: work.waits, "join waits")
    assert joined.is_alive()
    work.future.set_result([])
    joined.join(5)
    assert not joined.is_alive()
    assert finished == [reduction]


def test_a_backend_without_futures_is_looked_at_in_the_join(pending: Pending, finished: list[Reduction]) -> None:
    """gloo's reduce-scatter has no future: its result is looked at by the next join."""
    pending.when_complete(reduction := _reduction(Slow(futureless=True)))
    assert finished == []
    pending.join()
    assert finished == [reduction]


def _given_away(work: Slow, gradient: torch.Tensor) -> Reduction:
    """A gradient that a loop reduces and does not wait for."""
    reduction = _reduction(work)
    reduction.outputs, reduction.versions, reduction.given_away = [gradient], (gradient._version,), True
    return reduction


def test_gradients_are_under_way_until_their_collective_is_done(pending: Pending) -> None:
    """Those that a loop went on without; what nobody can write before, or what has been looked at, is not."""
    work, done = Slow(), Slow()
    done.future.set_result([])
    pending.when_complete(reduction := _given_away(work, torch.ones(2)))
    pending.when_complete(_reduction(Slow()))
    pending.when_complete(_given_away(done, torch.ones(2)))
    assert pending.under_way() == [reduction]
    work.future.set_result([])
    assert pending.under_way() == []


def test_a_backend_that_fails_when_asked_has_nothing_under_way(pending: Pending) -> None:
    """A collective that failed is its user's to hear of, and one without a Work any more was looked at."""

    class Broken(Slow):
        def is_completed(self) -> bool:
            """A backend may say so here already."""
            raise RuntimeError("Connection closed by peer")

    pending.when_complete(_given_away(Broken(), torch.ones(2)))
    pending.when_complete(looked_at := _given_away(Slow(), torch.ones(2)))
    looked_at.work = None
    assert pending.under_way() == []


def test_whether_a_result_was_written_is_told_by_its_versions() -> None:
    """Where they were noted when the collective was issued; a reduction whose result nobody can have written notes none."""
    reduction = _given_away(Slow(), tensor := torch.ones(2))
    assert not written_since(reduction)
    tensor.mul_(2.0)
    assert written_since(reduction)
    reduction.versions = ()
    assert not written_since(reduction)


@pytest.mark.parametrize("how", ["now", "when_complete"])
def test_a_failed_collective_is_counted_not_raised(finished: list[Reduction], how: str) -> None:
    """A peer that died is the user's own error to meet; there is no result to look at."""
    health = Health(0, lambda _reason: None)
    pending = Pending(finished.append, health)
    work = Slow(fails=True)
    getattr(pending, how)(_reduction(work))
    if how == "when_complete":
        work.future.set_exception(RuntimeError("Connection closed by peer"))
        pending.join()
    assert finished == []
    assert health.drops == {"collective_failed": 1}
    assert not health.faults


def test_a_callback_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch, finished: list[Reduction]) -> None:
    """A join does not wait for ever for the thread that calls back, and counts what it gave up."""
    monkeypatch.setattr(pending_module, "JOIN_SECONDS", 0.01)
    health = Health(0, lambda _reason: None)
    pending = Pending(finished.append, health)

    class Silent(Slow):
        def wait(self) -> None:
            """The collective is complete, its callback has not run."""

    pending.when_complete(_reduction(Silent()))
    pending.join()
    assert health.drops == {"check_not_finished": 1}


def test_a_fault_in_a_completion_callback_is_counted() -> None:
    """The callback runs on a thread of the backend's own, where an exception would be lost or worse."""

    def broken(_reduction: Reduction) -> None:
        raise ValueError("no such thing")

    health = Health(0, lambda _reason: None)
    pending = Pending(broken, health)
    work = Slow()
    pending.when_complete(_reduction(work))
    work.future.set_result([])
    pending.join()
    assert health.faults == {"completion:ValueError": 1}


def test_finished_collectives_outside_of_a_round_do_not_pile_up(watched: Watched) -> None:
    """A long evaluation with asynchronous reductions and no step leaves nothing behind for each of them."""
    for _ in range(50):
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    assert len(watched.agent.ledger.pending._waiting) < 10


# --- nobody writes what is still read ----------------------------------------------------------------------------------


def _write_at_once(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.fill_(float("nan"))


WRITERS: dict[str, Callable[[nn.Module], Any]] = {
    "clipping": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6, norm_type=float("inf")),
    "zeroing": lambda model: model.zero_grad(set_to_none=False),
    "overwriting": _write_at_once,
}


@pytest.mark.parametrize("view", [False, True], ids=["copies", "bucket views"])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_ddp_s_results_are_read_before_backward_returns(
    watch: Callable[..., Watched], write: Callable[[nn.Module], Any], view: bool
) -> None:
    """With slow checks, what follows backward at once still finds every check done: nothing nonfinite was read."""
    watched = watch(check_delay=0.02)
    model = DistributedDataParallel(nn.Linear(64, 4), gradient_as_bucket_view=view)
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        counted = watched.agent.checker.count
        write(model)
        assert watched.agent.checker.count == counted
        optimizer.zero_grad()
        optimizer.step()
    assert watched.evidence() == []
    assert [r.checks for r in watched.rounds] == [2, 2, 2]


def test_a_loop_s_own_reductions_are_read_before_wait_returns(watch: Callable[..., Watched]) -> None:
    """Whoever waits for his asynchronous reductions and then writes the gradients does not race the checks."""
    watched = watch(check_delay=0.02)
    model = nn.Linear(64, 4)
    watched.agent.root_made(model)
    model(torch.ones(2, 64)).sum().backward()
    works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
    for work in works:
        work.wait()
    _write_at_once(model)
    watched.agent.ledger.pending.join()
    assert watched.evidence() == []


def test_a_skipped_round_is_closed_after_its_checks(watched: Watched) -> None:
    """A reduce-scatter's result that nobody looked at yet belongs to the round that issued it, skipped or not."""
    model = nn.Linear(2, 1)
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    output = torch.zeros(2)
    dist.reduce_scatter(output, [model.weight.grad.flatten() * float("nan")], async_op=True).wait()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert {e.round for e in watched.evidence()} == {0}
