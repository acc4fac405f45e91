"""The clock: however a loop is written, a round closes once for each update, and its step is the loop's own counter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import Watched

from sentinel.wire.messages import REWRITTEN, ClosedBy, Phase, Role
from sentinel_agent.check import EMPTY
from sentinel_agent.rounds import Reduction
from sentinel_agent.taps import leaving

N = 4
Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "bare": lambda model: model,
    "ddp": DistributedDataParallel,
    "bucket views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
}


def _net(inputs: int = 3, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def _batch() -> torch.Tensor:
    return torch.randn(5, 3)


def _sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def _loss(model: nn.Module, batch: torch.Tensor | None = None) -> torch.Tensor:
    loss: torch.Tensor = model(_batch() if batch is None else batch).square().mean()
    return loss


@pytest.fixture(params=WRAPS.values(), ids=WRAPS.keys())
def model(request: pytest.FixtureRequest, watched: Watched) -> nn.Module:
    """A small model, bare or wrapped, that the agent knows."""
    made = request.param(_net())
    watched.agent.root_made(made)
    return made  # type: ignore[no-any-return]


# --- one optimizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before forward", "before backward", "after step"])
def test_a_plain_loop(watched: Watched, model: nn.Module, place: str) -> None:
    """One backward and one step is one round, wherever gradients are cleared."""
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        if place == "before forward":
            optimizer.zero_grad()
        loss = _loss(model)
        if place == "before backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if place == "after step":
            optimizer.zero_grad()
    assert watched.steps == [r.round for r in watched.rounds] == list(range(N))
    assert set(watched.closed_by) == {ClosedBy.OPTIMIZER}
    assert not any(r.skipped or r.evidence for r in watched.rounds)


def test_the_loss_of_the_round_is_reported(watched: Watched, model: nn.Module) -> None:
    """Each record carries the value that backward was called on."""
    optimizer = _sgd(model.parameters())
    losses = []
    for _ in range(N):
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [r.loss for r in watched.rounds] == losses


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_accumulation_that_synchronises_each_time(watched: Watched, model: nn.Module, micro_batches: int) -> None:
    """Several backwards before a step are one round, although DDP reduces in each."""
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            _loss(model).backward()
        optimizer.step()
    assert watched.steps == list(range(N))


@pytest.mark.parametrize("view", [False, True], ids=["copies", "bucket views"])
def test_accumulation_under_no_sync(watched: Watched, view: bool) -> None:
    """Backwards without a reduction belong to the round of the one that reduces."""
    model = DistributedDataParallel(_net(), gradient_as_bucket_view=view)
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        optimizer.zero_grad()
        with model.no_sync():
            _loss(model).backward()
            _loss(model).backward()
        _loss(model).backward()
        optimizer.step()
    assert watched.steps == list(range(N))


def test_two_losses_of_one_forward(watched: Watched) -> None:
    """A second backward through the same graph is part of the round."""
    model = _net()
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        optimizer.zero_grad()
        output = model(_batch())
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
    assert watched.steps == list(range(N))


def test_backward_called_on_autograd_itself(watched: Watched, model: nn.Module) -> None:
    """``torch.autograd.backward`` on several roots is a backward like any other."""
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        optimizer.zero_grad()
        output = model(_batch())
        torch.autograd.backward([output.square().mean(), output.abs().mean()])
        optimizer.step()
    assert watched.steps == list(range(N))


def test_gradients_taken_with_autograd_grad(watched: Watched) -> None:
    """A loop that asks for gradients and puts them into ``.grad`` itself counts its steps all the same."""
    model = _net()
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        gradients = torch.autograd.grad(_loss(model), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert watched.steps == list(range(N))


def test_a_scheduler_and_an_evaluation_in_between(watched: Watched, model: nn.Module) -> None:
    """Forwards without a backward close nothing, nor does a scheduler."""
    optimizer = _sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(N):
        optimizer.zero_grad()
        _loss(model).backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            _loss(model)
    assert watched.steps == list(range(N))


def test_a_step_without_a_backward_is_no_round(watched: Watched, model: nn.Module) -> None:
    """Some scripts step once before the training, to set the optimizer's state up."""
    optimizer = _sgd(model.parameters())
    optimizer.step()
    assert watched.rounds == []
    _loss(model).backward()
    optimizer.step()
    optimizer.step()
    assert watched.steps == [0]


@pytest.mark.parametrize("style", ["lightning", "plain"])
def test_a_closure_that_is_evaluated_once(watched: Watched, model: nn.Module, style: str) -> None:
    """Backward runs inside ``step(closure)``: the round is judged after it, as one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        return loss

    losses = []
    for _ in range(N):
        loss = optimizer.step(closure=closure) if style == "lightning" else optimizer.step(closure)
        losses.append(loss.item())  # type: ignore[attr-defined]
    assert watched.steps == list(range(N))
    assert [r.loss for r in watched.rounds] == losses


def test_a_closure_that_is_evaluated_many_times(watched: Watched) -> None:
    """LBFGS evaluates its closure as often as its line search wants: each time is a round, all of them of one step."""
    model, batch = _net(), _batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    evaluations = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        evaluations[-1] += 1
        return loss

    for _ in range(N):
        evaluations.append(0)
        optimizer.step(closure)
    assert sum(evaluations) > N
    assert sorted(set(watched.steps)) == list(range(N))


# --- steps that are left out -------------------------------------------------------------------------------------------

CLEARED: dict[str, Callable[[Any, Any], None]] = {
    "set to none": lambda model, optimizer: optimizer.zero_grad(),
    "zeroed": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, optimizer: model.zero_grad(),
    "none by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "zero_ by hand": lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
}


@pytest.mark.parametrize("place", ["before forward", "after forward"])
@pytest.mark.parametrize("clear", CLEARED.values(), ids=CLEARED.keys())
def test_steps_that_the_script_leaves_out(
    watched: Watched, model: nn.Module, clear: Callable[[Any, Any], None], place: str
) -> None:
    """An ``if`` around the step: the round ends when its gradients are cleared, as skipped, and the counter goes on."""
    optimizer = _sgd(model.parameters())
    for i in range(N):
        if place == "before forward":
            clear(model, optimizer)
        loss = _loss(model)
        if place == "after forward":
            clear(model, optimizer)
        loss.backward()
        if i != 1:
            optimizer.step()
    assert watched.steps == list(range(N))
    assert watched.closed_by == [
        ClosedBy.OPTIMIZER,
        ClosedBy.FRAMEWORK_SKIPPED,
        ClosedBy.OPTIMIZER,
        ClosedBy.OPTIMIZER,
    ]
    assert [r.skipped for r in watched.rounds] == [False, True, False, False]


def test_a_gradient_that_was_scaled_is_not_cleared(watched: Watched) -> None:
    """Accumulation that scales or clips gradients between micro-batches goes on in the same round."""
    model = _net()
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        optimizer.zero_grad()
        _loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        _loss(model).backward()
        optimizer.step()
    assert watched.steps == list(range(N))


def test_steps_left_out_one_after_another(watched: Watched, model: nn.Module) -> None:
    """Each skipped iteration is a round of its own, also the last one, which the end of the process closes."""
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        optimizer.zero_grad()
        _loss(model).backward()
    watched.agent.ledger.leaving("")
    assert watched.steps == list(range(N))
    assert watched.closed_by == [*[ClosedBy.FRAMEWORK_SKIPPED] * (N - 1), ClosedBy.EXIT]


def test_the_first_backward_of_a_skipped_accumulation_counts_once(watched: Watched, model: nn.Module) -> None:
    """Where a whole accumulation is thrown away, it is one skipped round."""
    optimizer = _sgd(model.parameters())
    for i in range(N):
        optimizer.zero_grad()
        for _ in range(3):
            _loss(model).backward()
        if i != 2:
            optimizer.step()
    assert watched.steps == list(range(N))
    assert [r.skipped for r in watched.rounds] == [False, False, True, False]


def test_updates_written_by_hand(watched: Watched, model: nn.Module) -> None:
    """Without an optimizer the rounds end where the gradients are cleared."""
    for _ in range(N):
        _loss(model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    watched.agent.ledger.leaving("")
    assert watched.steps == list(range(N))


def test_a_backward_for_the_inputs_is_part_of_the_iteration(watched: Watched) -> None:
    """Adversarial training takes a gradient to perturb its batch, clears, and trains on the result: one iteration."""
    model = _net()
    optimizer = _sgd(model.parameters())
    for batch in torch.utils.data.DataLoader(torch.randn(N, 3)):
        batch.requires_grad_()
        _loss(model, batch).backward()
        optimizer.zero_grad()
        _loss(model, (batch + 0.1 * batch.grad.sign()).detach()).backward()
        optimizer.step()
    assert max(watched.steps) == N - 1


# --- GradScaler --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_scaler_s_skip_closes_the_round(watched: Watched, model: nn.Module, fused: bool) -> None:
    """A step that a GradScaler leaves out is a round like others, marked as skipped, with the scale it had."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for i in range(N):
        optimizer.zero_grad()
        loss = _loss(model)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        if i == 1:
            next(iter(model.parameters())).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert watched.steps == list(range(N))
    skip = ClosedBy.SCALER_SKIP
    assert watched.closed_by == [ClosedBy.OPTIMIZER, skip, ClosedBy.OPTIMIZER, ClosedBy.OPTIMIZER]
    assert [r.skipped for r in watched.rounds] == [False, True, False, False]
    assert [r.loss_scale for r in watched.rounds] == [1024.0, 1024.0, 512.0, 512.0]
    assert [r.loss for r in watched.rounds] == losses


@pytest.mark.parametrize(("wrap", "phase"), [("ddp", Phase.WIRE), ("bare", Phase.RAW)])
def test_a_scaler_s_ordinary_skip_is_not_dumped(watched: Watched, wrap: str, phase: Phase) -> None:
    """Scaled gradients that overflow with a finite loss are how a scaler finds its scale: evidence, but no bundle."""
    model = WRAPS[wrap](_net())
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    for _ in range(N):
        optimizer.zero_grad()
        scaler.scale(_loss(model) * 50).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watched.rounds[0].closed_by is ClosedBy.SCALER_SKIP
    assert watched.evidence(phase)
    assert not watched.evidence(Phase.LOSS)
    assert not list(watched.agent.config.run_dir.glob("bundles/*"))


class UnderWay:
    """A collective that is done when somebody waits for it. A real one cannot be held up in a group of one rank."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def is_completed(self) -> bool:
        """Is it done?"""
        return self.future.done()

    def wait(self) -> None:
        """Be done."""
        if not self.future.done():
            self.future.set_result([])

    def get_future(self) -> torch.futures.Future[Any]:
        """Its future."""
        return self.future


def _give_away(watched: Watched, gradient: torch.Tensor) -> None:
    """A loop reduces this gradient and goes on."""
    given = Reduction("allreduce_", "0", (), 0, "SUM", "float32", Role.GRADIENT, EMPTY, [gradient], UnderWay())
    given.versions, given.steady, given.given_away = (gradient._version,), False, True
    watched.agent.ledger.pending.when_complete(given)


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_used_before_their_reduction_is_done_are_told_once(watched: Watched, clipped: bool) -> None:
    """By the optimizer that owns them, or clipping; an optimizer of other parameters may step meanwhile."""
    model, other = _net(), nn.Linear(3, 1)
    watched.agent.root_made(model)
    optimizer, free = _sgd(model.parameters()), _sgd(other.parameters())
    for _ in range(2):
        _loss(model).backward()
        other(_batch()).sum().backward()
        told_before = len(watched.evidence(Phase.MISUSE))
        _give_away(watched, model[0].weight.grad)  # type: ignore[index, union-attr]
        free.step()
        assert len(watched.evidence(Phase.MISUSE)) == told_before
        _give_away(watched, model[0].weight.grad)  # type: ignore[index, union-attr]
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert watched.evidence(Phase.MISUSE)
        optimizer.step()
        optimizer.zero_grad()
        free.zero_grad()
    (told,) = watched.evidence(Phase.MISUSE)
    assert (told.note, told.step) == ("used_under_way", 0)


def test_a_loss_that_the_script_passes_over_is_told(watched: Watched) -> None:
    """It skips the batch without a backward: found when its next forward begins, dated to the step it would have been."""
    model = _net()
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    for i in range(6):
        loss = _loss(model) * (float("nan") if i == 3 else 1.0)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (told,) = watched.evidence()
    assert (told.phase, told.step) == (Phase.LOSS, 3)
    assert math.isnan(told.value or 0.0)
    assert [r.loss is not None and math.isfinite(r.loss) for r in watched.rounds] == [True] * 5


def test_two_forwards_a_round_are_no_loss_passed_over(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every round has as many, nobody looks among the callers: that would be time spent in each."""
    looks: list[int] = []
    monkeypatch.setattr(leaving, "loss_passed_over", lambda _told: looks.append(1))
    model = _net()
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    for _ in range(4):
        (_loss(model) + _loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert looks == []


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_no_collective_carries_are_looked_at(watched: Watched, clipped: bool) -> None:
    """Before a clipping spreads one parameter's NaN over all of them, or else before the step."""
    model = _net()
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    for i in range(N):
        optimizer.zero_grad()
        _loss(model).backward()
        if i == 2:
            model[2].bias.grad.fill_(float("nan"))  # type: ignore[index, union-attr]
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if i == 2:
            break
    (raw,) = watched.evidence(Phase.RAW)
    assert (raw.round, raw.step, raw.parameters, raw.parameters_total) == (2, 2, ("2.bias",), 1)
    assert [r.evidence > 0 for r in watched.rounds] == [False, False, True]
    assert list(watched.agent.config.run_dir.glob("bundles/*"))


def _divided(model: nn.Module, by: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= by


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("way", ["ddp", "loop"])
def test_gradients_that_the_script_spoils_after_their_reduction_are_told(
    watched: Watched, way: str, clipped: bool
) -> None:
    """Divided by a number of tokens that is zero: as what was about to be applied, and before clipping hides which."""
    model = DistributedDataParallel(_net()) if way == "ddp" else _net()
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    for i in range(N):
        optimizer.zero_grad()
        _loss(model).backward()
        if way == "loop":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        _divided(model, 8.0)
        if i == 2:
            next(iter(model.parameters())).grad.fill_(float("nan"))  # type: ignore[union-attr]
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if i == 2:
            break
    (spoilt,) = watched.evidence()
    assert (spoilt.phase, spoilt.note, spoilt.step) == (Phase.APPLIED, REWRITTEN, 2)
    assert spoilt.parameters == ("0.weight",)
    assert list(watched.agent.config.run_dir.glob("bundles/*"))


def test_an_optimizer_s_own_gradients_alone_are_read_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop with an optimizer for each parameter reads every gradient once more, and not all of them for each of its steps."""
    model = _net()
    watched.agent.root_made(model)
    optimizers = [_sgd([parameter]) for parameter in model.parameters()]
    looks: list[list[torch.Tensor]] = []

    def look(gradients: Iterable[torch.Tensor], **_options: bool) -> bool:
        looks.append(list(gradients))
        return True

    monkeypatch.setattr(watched.agent.scan, "gradients_look_finite", look)
    _loss(model).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    _divided(model, 2.0)
    for optimizer in optimizers:
        optimizer.step()
    assert {len(gradients) for gradients in looks} == {1}


def test_clipping_one_by_one_reads_each_gradient_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that averages and then clips parameter by parameter has each looked at when it is its turn, not all at each."""
    model = _net()
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    looks: list[list[torch.Tensor]] = []

    def look(gradients: Iterable[torch.Tensor], **_options: bool) -> bool:
        looks.append(list(gradients))
        return True

    monkeypatch.setattr(watched.agent.scan, "gradients_look_finite", look)
    _loss(model).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    _divided(model, 2.0)
    for parameter in model.parameters():
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    optimizer.step()
    assert sum(map(len, looks)) == len(list(model.parameters()))


def test_nothing_is_read_again_where_nobody_wrote(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP, a scaler that unscales and a clipping: all that writes gradients here is known, and costs no further look."""
    model = DistributedDataParallel(_net())
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    looks: list[int] = []
    monkeypatch.setattr(
        watched.agent.scan, "gradients_look_finite", lambda *_args, **_options: bool(looks.append(1) or True)
    )
    for i in range(N):
        optimizer.zero_grad()
        scaler.scale(_loss(model)).backward()
        if i % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert len(watched.rounds) == N
    assert looks == []


def test_each_backward_s_own_gradients_are_looked_at(watched: Watched) -> None:
    """Two models, each clipped after its own backward: the first look leaves the second model's gradients to the next."""
    first, second = _net(), nn.Linear(3, 1)
    for model in (first, second):
        watched.agent.root_made(model)
    optimizer = _sgd([*first.parameters(), *second.parameters()])
    for model in (first, second):
        _loss(model).backward()
        if model is second:
            second.bias.grad.fill_(float("nan"))  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    (raw,) = watched.evidence(Phase.RAW)
    assert raw.parameters_total == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_healthy_gradients_that_no_collective_carries_raise_nothing(watched: Watched, dtype: torch.dtype) -> None:
    """Whatever their dtype, and where some parameters have none."""
    model = _net().to(dtype)
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    for _ in range(N):
        optimizer.zero_grad()
        model[0](_batch().to(dtype)).square().mean().backward()  # type: ignore[index]
        optimizer.step()
    assert [r.evidence for r in watched.rounds] == [0] * N


@pytest.mark.parametrize(
    ("made", "late", "kept"),
    [(float("nan"), True, True), (float("inf"), True, False), (float("nan"), False, False)],
    ids=["NaN", "overflow", "NaN in search of a scale"],
)
def test_a_skip_that_no_scale_explains_is_dumped(watched: Watched, made: float, late: bool, kept: bool) -> None:
    """NaN with no infinity, at a scale that has stepped before: the step's batch is what tells why. Others are a scaler's own."""
    model = DistributedDataParallel(_net())
    watched.agent.root_made(model)
    optimizer = _sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    bad = 2 if late else 0
    for i in range(3):
        optimizer.zero_grad()
        loss = _loss(model)
        if i == bad:
            next(iter(model.parameters())).register_hook(lambda gradient: gradient + made)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i == bad:
            break
    assert watched.rounds[-1].closed_by is ClosedBy.SCALER_SKIP
    assert watched.evidence(Phase.WIRE)
    assert bool(list(watched.agent.config.run_dir.glob("bundles/*"))) is kept


def test_a_disabled_scaler_is_not_there(watched: Watched, model: nn.Module) -> None:
    """With ``enabled=False`` the optimizer's own hook tells of the step, and there is no scale."""
    optimizer = _sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(N):
        optimizer.zero_grad()
        scaler.scale(_loss(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watched.steps == list(range(N))
    assert [r.loss_scale for r in watched.rounds] == [None] * N


# --- the end -----------------------------------------------------------------------------------------------------------


def test_an_open_round_is_closed_at_the_end(watched: Watched, model: nn.Module) -> None:
    """A process that ends between backward and step leaves the record of that round, and no second one."""
    _loss(model).backward()
    watched.agent.ledger.leaving("RuntimeError: out of memory")
    watched.agent.ledger.leaving("")
    assert watched.closed_by == [ClosedBy.EXIT]
    (note,) = watched.evidence(Phase.EXIT)
    assert note.note == "RuntimeError: out of memory"


def test_nothing_open_leaves_nothing(watched: Watched, model: nn.Module) -> None:
    """After the last step there is no round to close."""
    optimizer = _sgd(model.parameters())
    _loss(model).backward()
    optimizer.step()
    watched.agent.ledger.leaving("")
    assert watched.closed_by == [ClosedBy.OPTIMIZER]
    assert watched.agent.ledger.last_closed == 0
