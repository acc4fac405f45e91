"""The audit of a forward: overflow that is absorbed is seen, constants and dead infinities are not, results stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from watched import Watched

from sentinel.wire.messages import Phase
from sentinel_agent.taps import audit


class Half(nn.Module):
    """A half-precision block whose product overflows when ``gain`` is large, and whose sigmoid absorbs it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 16.0))

    def forward(self, x: torch.Tensor, gain: float) -> torch.Tensor:
        """Infinite in the middle, finite at the end."""
        product = (x.half() * gain) @ self.weight.half()
        return torch.sigmoid(product.float()).mean()


class Masked(nn.Module):
    """Attention with the masks people write: -inf filled in, and the smallest number added."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Infinities that are meant."""
        scores = self.project(x).half() - 40.0
        scores = scores + (torch.eye(4) * -1e9).to(torch.float16) + torch.eye(4).half() * -1e9
        causal = torch.full((4, 4), torch.finfo(torch.float16).min, dtype=torch.float16).triu(1)
        filled = (scores + causal).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
        return filled.float().softmax(-1).sum()


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """What other tests have compiled in this process is forgotten."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def watched(watch: Callable[..., Watched]) -> Watched:
    """An agent whose settings ask for the audit."""
    return watch(audit=True)


def _train(watched: Watched, model: nn.Module, forward: Callable[[int], torch.Tensor], rounds: int) -> None:
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(rounds):
        optimizer.zero_grad()
        forward(number).backward()
        optimizer.step()


def test_an_absorbed_overflow_is_seen_in_the_audited_rounds(watched: Watched) -> None:
    """Rounds 1, 2, 4: the product's overflow is told once per audited round, with op, dtype, this file's line and the module."""
    model, x = Half(), torch.ones(4, 4)
    _train(watched, model, lambda number: model(x, 4000.0 if number >= 2 else 1.0), 6)
    seen = watched.evidence(Phase.AUDIT)
    assert [e.round for e in seen] == [2, 4]
    assert seen[0].check.inf == 16
    assert seen[0].note.startswith("mm overflowed float16 at test_audit.py:")
    assert seen[0].note.endswith(" in Half; not in round 1, the last one looked at")


def test_masks_and_finite_values_are_not_seen(watched: Watched) -> None:
    """-inf fills, -1e9 cast to float16, and finfo.min to which a score is added, are ordinary attention."""
    model, x = Masked(), torch.randn(4, 4)
    _train(watched, model, lambda _number: model(x), 5)
    assert watched.evidence(Phase.AUDIT) == []


def test_the_mode_is_left_when_the_forward_fails(watched: Watched) -> None:
    """A forward that raises leaves no dispatch mode behind."""
    model = Half()
    watched.agent.root_made(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 3), 1.0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_mode_is_left_when_the_agent_goes_off(watched: Watched) -> None:
    """An agent that switches itself off inside of a forward still takes its mode out at the end."""
    model = Half()
    watched.agent.root_made(model)
    model.register_forward_pre_hook(lambda *_: watched.agent.health.disable("told by a test"))
    model(torch.ones(4, 4), 1.0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("when", [0, 2])
def test_a_model_that_is_to_be_compiled_is_compiled_whole(watched: Watched, when: int) -> None:
    """Once torch.compile was called nothing is traced, in the compiled model's first forward least of all."""
    model = nn.Linear(2, 2)
    _train(watched, model, lambda _number: model(torch.ones(1, 2)).sum(), when)
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _example: object) -> Callable[..., object]:
        calls.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    watched.agent.root_made(compiled)
    assert watched.agent.ledger.round.number == when
    assert compiled(torch.ones(1, 2)).shape == (1, 2)
    assert calls == [1]


def test_nothing_is_traced_where_another_mode_runs(watched: Watched) -> None:
    """A mode of the user's own, such as a counter of operations, is left alone."""
    model, x = Half(), torch.ones(4, 4)

    def forward(_number: int) -> torch.Tensor:
        with FlopCounterMode(display=False):
            return model(x, 4000.0)

    _train(watched, model, forward, 3)
    assert watched.evidence(Phase.AUDIT) == []


def test_a_spent_budget_ends_it(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where audited forwards have taken too long, the next ones are left alone."""
    model, x = Half(), torch.ones(4, 4)
    monkeypatch.setattr(audit, "BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(audit, "BUDGET_SHARE", 0.0)
    _train(watched, model, lambda _number: model(x, 4000.0), 6)
    assert [e.round for e in watched.evidence(Phase.AUDIT)] == [1]


def test_a_fault_of_its_own_stays_its_own(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while looking is swallowed and counted; the forward's result is there."""
    watched.expects_faults = True
    monkeypatch.setattr(audit, "_count", lambda *_: 1 / 0)
    model, x = Half(), torch.ones(4, 4)
    _train(watched, model, lambda _number: model(x, 1.0), 2)
    assert watched.agent.health.faults["audit:ZeroDivisionError"] >= 1


def test_on_a_device_one_answer_is_fetched_for_all(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are not the host's are looked at where they are, and asked about once, after the forward.

    Host tensors stand in for the device's: there is none here.
    """
    monkeypatch.setattr(audit, "_is_on_host", lambda _tensor: False)
    monkeypatch.setattr(audit, "_takes_work", lambda _tensor: True)
    asked: list[int] = []
    stack = torch.stack

    def counting(tensors: list[torch.Tensor]) -> torch.Tensor:
        if tensors[0].dtype is torch.int64:  # the checks' own norms are stacked, too
            asked.append(len(tensors))
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", counting)
    model, x = Half(), torch.ones(4, 4)
    _train(watched, model, lambda number: model(x, 4000.0 if number >= 2 else 1.0), 3)
    (seen,) = watched.evidence(Phase.AUDIT)
    assert (seen.round, seen.check.inf) == (2, 16)
    assert seen.note.startswith("mm overflowed float16 at test_audit.py:")
    assert len(asked) == 2  # rounds 1 and 2


def test_results_are_the_same_with_and_without(watched: Watched) -> None:
    """Losses of audited rounds are bit-identical to those of rounds that are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    watched.agent.root_made(model)
    x = torch.randn(4, 4)
    traced: list[int] = []

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
            return output.float().square().mean()

    model[0].register_forward_hook(lambda *_: traced.append(torch._C._len_torch_dispatch_stack()))
    losses = []
    for _ in range(4):
        losses.append(loss())
        losses[-1].backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert traced == [0, 1, 1, 0]
    assert len({value.item() for value in losses}) == 1
