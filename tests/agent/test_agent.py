"""The agent as a whole, in one process: it sees what happens, harms nothing, and is off for good when it is not well."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from watched import Watched, run_ranks

from sentinel.wire.messages import ClosedBy, Disabled, Hello, PartWritten, Phase, Role
from sentinel_agent.errors import Health
from sentinel_agent.ledger import MAX_EVIDENCE
from sentinel_agent.naming import Naming
from sentinel_agent.pending import Pending
from sentinel_agent.scan import Scan
from sentinel_agent.taps.scaler import ScalerTap
from sentinel_agent.window import Window

NAN, INF = float("nan"), float("inf")

# --- a fault of its own ------------------------------------------------------------------------------------------------


def _samples(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 6), torch.randn(count, 1)), batch_size=4, shuffle=True)


def _everything(steps: int = 1) -> list[list[float]]:
    """A training that passes every tap; its parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, (x, y) in enumerate(_samples(4 * steps)):
        optimizer.zero_grad()
        scaler.scale((wrapped(x) - y).square().mean()).backward()
        if step % 2:
            next(model.parameters()).grad[0, 0] = INF  # type: ignore[index]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        for work in works:
            work.wait()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def _broken(*_args: Any, **_kwargs: Any) -> None:
    raise ValueError("a fault planted by a test")


def _sites(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, broken: str = ""
) -> tuple[Watched, set[str]]:
    """Start an agent whose tap ``broken`` raises each time it is called; also, the names of all the taps it guards."""
    guarded, seen = Health.guarded, set[str]()

    def planted(health: Health, site: str, function: Callable[..., Any], **options: bool) -> Callable[..., Any]:
        seen.add(site)
        return guarded(health, site, _broken if site == broken else function, **options)

    monkeypatch.setattr(Health, "guarded", planted)
    return watch(guard="skip", audit=True), seen


IN_TRAINING = {
    *("wire", "wire_result", "join", "completion", "loss", "agree", "backward_end", "optimizer", "optimizer_made"),
    "optimizer_stepped",
    *(
        "scaler",
        "scaler_step",
        "scaler_scale",
        "clip",
        "clipped",
        "unscale",
        "unscaled",
        "loader",
        "indices",
        "forward",
        "forward_end",
        "audit",
    ),
}
ELSEWHERE = {"agreement", "announce", "anomaly", "redaction", "misuse", "leaving", "exit", "terminate", "shadow"}


@pytest.mark.parametrize("site", sorted(IN_TRAINING))
def test_a_fault_in_any_tap_is_counted_and_kept_from_the_training(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    """Whichever tap raises, the training runs as without an agent, and the fault is counted under the tap's name."""
    expected = _everything(2)
    watched, _ = _sites(watch, monkeypatch, site)
    watched.expects_faults = True
    assert _everything(2) == expected
    watched.agent.audit.forward_ended()  # where it is this that was broken, the mode of an audited forward is still there
    assert watched.faults.get(f"{site}:ValueError", 0) > 0


def test_no_tap_is_forgotten(watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of taps above is that of the agent."""
    _, seen = _sites(watch, monkeypatch)
    _everything(2)
    assert seen == IN_TRAINING | ELSEWHERE


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Naming, "add_optimizer"),
        (Naming, "parameters"),
        (Pending, "join"),
        (ScalerTap, "about_to_step"),
        (ScalerTap, "unscaled"),
        (Scan, "remember_gradients"),
        (Window, "before_batch"),
        (Window, "close_round"),
        (Window, "forward_inputs"),
        (Window, "loader_batch"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_deep_inside_is_kept_from_the_training(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """Whatever part of the agent raises, some tap catches it."""
    expected = _everything(2)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _broken)
        watched = watch()
        watched.expects_faults = True
        assert _everything(2) == expected
    assert sum(watched.faults.values()) > 0


def test_the_fifth_fault_switches_the_agent_off(
    watch: Callable[..., Watched], capsys: pytest.CaptureFixture[str]
) -> None:
    """After five faults there is one line on stderr and one report, and from then on nothing is looked at."""
    watched = watch(fail_at="wire")
    watched.expects_faults = True
    _everything(8)
    assert sum(watched.faults.values()) == 5
    assert not watched.agent.health.active
    (disabled,) = [r for r in watched.reports if isinstance(r, Disabled)]
    assert "planted" in disabled.reason
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "switched itself off" in printed
    before = (len(watched.reports), watched.agent.checker.count)
    _everything(2)
    assert (len(watched.reports), watched.agent.checker.count) == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_not_watched(watched: Watched) -> None:
    """In a child, as DataLoader forks them, every tap is silent; the parent is watched on."""
    model = nn.Linear(6, 1)
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = len(watched.reports)
    child = os.fork()
    if child == 0:
        model(torch.full((1, 6), NAN)).sum().backward()
        optimizer.step()
        os._exit(int(watched.agent.health.active) + 2 * (len(watched.reports) != before))
    assert os.waitpid(child, 0)[1] == 0
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert watched.agent.health.active
    assert watched.steps == [0]


# --- what it tells -----------------------------------------------------------------------------------------------------


def test_the_first_report_is_hello(watch: Callable[..., Watched]) -> None:
    """Who it is, where it runs and with which versions."""
    watched = watch(attempt=2, local_rank=1, node=4, host="node4")
    hello = watched.reports[0]
    assert isinstance(hello, Hello)
    assert (hello.attempt, hello.rank, hello.local_rank, hello.node, hello.world_size) == (2, 0, 1, 4, 1)
    assert (hello.host, hello.pid, hello.torch_version) == ("node4", os.getpid(), torch.__version__)


@pytest.fixture
def poisoned(watched: Watched) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A DDP model and its optimizer; two healthy rounds have passed."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1)))
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        _step(model, optimizer)
    assert watched.evidence() == []
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 6), value)).square().mean().backward()
    optimizer.step()


def test_a_bad_batch_tells_its_story_in_order(
    watched: Watched, poisoned: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    """Loss, wire and result, each with round and step; the record counts them, and this rank's part is on disk before the step."""
    _step(*poisoned, value=NAN)
    evidence = watched.evidence()
    assert [e.phase for e in evidence] == [Phase.LOSS, Phase.WIRE, Phase.REDUCED, Phase.APPLIED]
    assert [e.order for e in evidence] == [0, 1, 2, 3]
    assert {(e.round, e.step) for e in evidence} == {(2, 2)}
    assert evidence[0].value is not None
    assert evidence[0].value != evidence[0].value
    assert evidence[1].parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert evidence[1].collective is not None
    assert evidence[1].collective.role is Role.GRADIENT
    assert watched.rounds[-1].evidence == 4
    assert watched.rounds[-1].params_nonfinite is False
    (part,) = [r for r in watched.reports if isinstance(r, PartWritten)]
    assert (part.round, part.step, part.error) == (2, 2, "")
    header = json.loads((Path(part.directory) / "part.json").read_text())
    assert header["state_after_step"] is False


def test_the_echo_of_a_bad_round_says_so(watched: Watched, poisoned: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """Once parameters are lost, later rounds are bad too: they say that the parameters were so before, and write no part."""
    for value in (NAN, 1.0, 1.0):
        _step(*poisoned, value=value)
    assert [bool(r.params_nonfinite) for r in watched.rounds] == [False, False, False, True, True]
    assert len([r for r in watched.reports if isinstance(r, PartWritten)]) == 1


def test_parameters_that_are_bad_before_the_first_forward(watched: Watched) -> None:
    """A broken initialisation is found before anything ran."""
    model = DistributedDataParallel(nn.Linear(6, 1))
    with torch.no_grad():
        model.module.weight[0, 2] = NAN
    watched.agent.root_made(model)
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = watched.evidence()[0]
    assert first.phase is Phase.INIT
    assert first.parameters == ("weight",)
    assert (first.round, first.step) == (0, 0)


def test_buffers_that_a_bad_batch_damaged(watched: Watched) -> None:
    """Normalisation statistics keep NaN; the round's record says so."""
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)))
    watched.agent.root_made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    _step(model, optimizer, INF)
    buffers = watched.evidence(Phase.BUFFERS)
    assert buffers
    assert set(buffers[0].parameters) <= {"0.running_mean", "0.running_var"}
    assert watched.rounds[-1].buffers_nonfinite


def test_the_loss_is_told_unscaled(watched: Watched) -> None:
    """Under a GradScaler the loss that overflowed only by its scale is finite, and told as such."""
    model = nn.Linear(6, 1)
    watched.agent.root_made(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.full((2, 6), 1e3)).square().sum()
    scaler.scale(loss * 1e3).backward()
    scaler.step(optimizer)
    assert watched.evidence(Phase.LOSS) == []
    assert watched.rounds[0].loss == pytest.approx(loss.item() * 1e3)


def test_evidence_of_one_round_is_limited(watched: Watched) -> None:
    """A round in which everything is nonfinite does not flood the wire: the rest is counted."""
    for _ in range(MAX_EVIDENCE + 10):
        dist.all_reduce(torch.tensor(NAN))
    assert len(watched.evidence()) == MAX_EVIDENCE
    assert watched.agent.health.drops["evidence_over_limit"] == 10


def test_the_round_that_a_scaler_skips_is_told(watched: Watched) -> None:
    """The record of a skipped round has its scale and its evidence."""
    model = DistributedDataParallel(nn.Linear(6, 1))
    watched.agent.root_made(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.full((2, 6), 50.0)).square().sum()).backward()
    scaler.step(optimizer)
    (closed,) = watched.rounds
    assert closed.closed_by is ClosedBy.SCALER_SKIP
    assert closed.loss_scale == pytest.approx(3e38)
    assert closed.evidence == len(watched.evidence()) > 0


# --- two ranks ---------------------------------------------------------------------------------------------------------

RANKS = """
import json, sys
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from sentinel.wire.messages import Phase
from watched import watched_rank

watched = watched_rank(Path(sys.argv[1]), check_delay=0.005)
rank = watched.agent.me.rank
pair, alone = dist.new_group([0, 1]), [dist.new_group([r], timeout=timedelta(seconds=20)) for r in (0, 1)][rank]

def model():
    torch.manual_seed(0)
    made = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 1)), gradient_as_bucket_view=True)
    watched.agent.root_made(made)
    return made, torch.optim.SGD(made.parameters(), lr=0.01)

def told():
    phases = [(e.phase, e.step, e.parameters, e.collective.ranks if e.collective else None) for e in watched.evidence()]
    steps, faults = watched.steps, dict(watched.faults)
    watched.reports.clear()
    return {"evidence": phases, "steps": steps, "faults": faults}

net, optimizer = model()
for _ in range(40):
    optimizer.zero_grad()
    net(torch.randn(4, 64)).square().mean().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    optimizer.step()
healthy = told()

optimizer.zero_grad()
net(torch.full((4, 64), float("nan") if rank == 1 else 1.0)).square().mean().backward()
optimizer.step()
rank_local = told()

net, optimizer = model()
for parameter in net.parameters():
    parameter.grad = torch.ones_like(parameter)
net(torch.ones(1, 64)).sum()
half = [torch.full_like(parameter, 4e4, dtype=torch.float16) for parameter in net.parameters()]
watched.agent.ledger.backward_begins(); watched.agent.ledger.backward_ended()
for gradient in half:
    dist.all_reduce(gradient)
optimizer.step()
overflow = told()

dist.all_reduce(torch.full((3,), float("nan")), group=alone)
subgroup = told()
watched.agent.stop()
print(json.dumps([healthy, rank_local, overflow, subgroup]))
"""


@pytest.mark.e2e
def test_two_ranks_see_each_other_s_faults(tmp_path: Path) -> None:
    """Over two ranks, with slow checks and clipping right after backward: no false evidence; a rank's NaN is that rank's on
    the wire and everybody's in the result; a sum that overflows is finite on every wire."""
    innocent, guilty = run_ranks(RANKS, tmp_path)
    for told in (innocent, guilty):
        healthy, _, overflow, subgroup = told
        assert healthy == {"evidence": [], "steps": list(range(40)), "faults": {}}
        assert {phase for phase, *_ in overflow["evidence"]} - {"applied"} == {"reduced"}
        assert not overflow["faults"]
        assert subgroup["evidence"][0][3] is not None
    phases = [[phase for phase, *_ in told[1]["evidence"]] for told in (innocent, guilty)]
    assert phases == [["reduced", "applied"], ["loss", "wire", "reduced", "applied"]]
    assert {step for _, step, *_ in guilty[1]["evidence"]} == {40}
    assert guilty[1]["evidence"][1][2] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [told[3]["evidence"][0][3] for told in (innocent, guilty)] == [[0], [1]]
