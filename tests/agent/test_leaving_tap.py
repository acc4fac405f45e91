"""The leaving tap: however a process ends, its open round is closed and a nonfinite loss it left because of is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_relay import KEY, Relay
from torch import nn
from watched import Watched, injected, run_python

from sentinel.wire import names
from sentinel.wire.messages import Check, ClosedBy, Evidence, Goodbye, Phase, Report, RoundClosed
from sentinel_agent import patching
from sentinel_agent.errors import Health
from sentinel_agent.taps import leaving

NAN = float("nan")


class Heard:
    """What the tap told."""

    def __init__(self) -> None:
        self.health = Health(0, lambda _reason: None)
        self.losses: list[float] = []
        self.notes: list[str] = []
        self.values: list[tuple[int, str]] = []

    def value(self, found: Check, where: str) -> bool:
        """A tensor with NaN was left behind."""
        self.values.append((found.nan, where))
        return True


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """A listener on the ends of this process, which does not end."""
    monkeypatch.setattr("atexit.register", lambda function: function)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    heard = Heard()
    leaving.install(heard.losses.append, heard.notes.append, lambda: None, heard.health, heard.value)
    yield heard
    patching.restore()


def _loss(value: float) -> torch.Tensor:
    return torch.ones((), requires_grad=True) * value


def _die(error: BaseException, local: Any = None) -> None:
    raise error


def _uncaught(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """What the interpreter does with an exception that nobody catches."""
    try:
        function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - as the interpreter
        sys.excepthook(type(error), error, error.__traceback__)


def test_an_exception_is_noted_in_one_line(heard: Heard) -> None:
    """Type and first line of the text, cut."""
    _uncaught(_die, RuntimeError("first line\nsecond line"))
    _uncaught(_die, KeyError())
    _uncaught(_die, ValueError("x" * 1000))
    assert heard.notes[:2] == ["RuntimeError: first line", "KeyError"]
    assert len(heard.notes[2]) < 200
    assert heard.losses == []


def test_an_exception_that_cannot_be_shown_is_still_noted(heard: Heard) -> None:
    """An exception whose ``__str__`` raises gets to the original hook."""

    class Unshowable(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    _uncaught(_die, Unshowable())
    assert len(heard.notes) == 1


def test_the_original_hook_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's or a framework's excepthook is called with the same three things, even if ours fails."""
    seen: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda function: function)
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
    health = Health(0, lambda _reason: None)

    def broken(_note: Any) -> None:
        raise ValueError("no such thing")

    leaving.install(broken, broken, lambda: None, health)
    try:
        error = RuntimeError("of its own")
        _uncaught(_die, error)
    finally:
        patching.restore()
    assert seen == [(RuntimeError, error, error.__traceback__)]
    assert health.faults == {"leaving:ValueError": 1}


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")], ids=str)
def test_a_nonfinite_loss_in_the_frames_is_told(heard: Heard, value: float) -> None:
    """The script looked at its loss and raised: the loss is a local of a frame on the way out."""
    _uncaught(_die, RuntimeError("loss is not finite"), local=_loss(value))
    assert [str(loss) for loss in heard.losses] == [str(value)]


@pytest.mark.parametrize(
    "local",
    [
        _loss(2.0),
        torch.tensor(NAN),
        torch.full((3,), NAN, requires_grad=True) * 2,
        NAN,
        nn.Parameter(torch.tensor(NAN)),
    ],
    ids=["finite", "no history", "several elements", "a number", "a parameter"],
)
def test_other_values_in_the_frames_are_not_losses(heard: Heard, local: Any) -> None:
    """Only what a backward could be called on is a loss: metrics and buffers may be what they like."""
    _uncaught(_die, RuntimeError("something else"), local=local)
    assert heard.losses == []


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [((), []), ((0,), []), ((None,), []), ((3,), ["sys.exit(3)"]), (("no",), ["sys.exit(no)"])],
)
def test_sys_exit_is_noted_and_exits(heard: Heard, arguments: tuple[Any, ...], notes: list[str]) -> None:
    """The exit happens with the user's own status; success, as a healthy main ends, is nothing to note."""
    with pytest.raises(SystemExit) as left:
        sys.exit(*arguments)
    assert left.value.code == (arguments[0] if arguments else None)
    assert heard.notes == notes


def test_sys_exit_tells_of_a_loss_in_its_callers(heard: Heard) -> None:
    """``if not isfinite(loss): sys.exit(1)``, in a function or below it."""

    def stop() -> None:
        sys.exit(1)

    def train() -> None:
        loss = _loss(NAN)  # noqa: F841 - found in the frame
        stop()

    with pytest.raises(SystemExit):
        train()
    assert [str(loss) for loss in heard.losses] == ["nan"]


COMPUTED = torch.ones(3, requires_grad=True) * torch.tensor([1.0, NAN, NAN])


def test_without_a_loss_what_the_forward_had_computed_is_told(heard: Heard) -> None:
    """A loss function that refuses NaN raises before there is a loss: the tensor it was given is in the frames, and where."""
    _uncaught(_die, RuntimeError("all elements of input should be between 0 and 1"), local=COMPUTED)
    ((nan, where),) = heard.values
    assert nan == 2
    assert where.startswith("local in _die, test_leaving_tap.py:")
    assert heard.losses == []


@pytest.mark.parametrize(
    "local",
    [
        torch.full((3,), NAN),
        torch.ones(3, requires_grad=True) * float("inf"),
        torch.ones(3, requires_grad=True) * 2,
        torch.full((3,), NAN, requires_grad=True),
        _loss(NAN),
    ],
    ids=["no history", "a mask of infinities", "finite", "a parameter", "a loss, which is told itself"],
)
def test_other_tensors_in_the_frames_are_not_told(heard: Heard, local: torch.Tensor) -> None:
    """Batches and masks may hold what they like; a loss says more than what led to it."""
    _uncaught(_die, RuntimeError("something else"), local=local)
    assert heard.values == []


def test_a_script_that_leaves_in_order_is_not_searched(heard: Heard) -> None:
    """``sys.exit(0)`` with an odd tensor somewhere is a healthy end."""

    def train() -> None:
        odd = COMPUTED  # noqa: F841 - found in the frame, if anybody looked
        sys.exit(0)

    with pytest.raises(SystemExit):
        train()
    assert heard.values == []


def test_looking_for_a_loss_keeps_nothing(heard: Heard) -> None:
    """The look changes no local and holds no frame."""

    def train() -> int:
        count = 1
        with pytest.raises(SystemExit):
            sys.exit(1)
        count += 1
        return count

    assert train() == 2


def test_a_loss_that_was_already_told_is_not_told_again(watched: Watched) -> None:
    """A script that steps first and then leaves over its loss has one bad round, not two."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(1, 2)).sum() * NAN
    loss.backward()
    optimizer.step()
    with pytest.raises(SystemExit):
        sys.exit(1)
    assert {e.round for e in watched.evidence(Phase.LOSS)} == {0}


# --- processes that really end -----------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, warnings
import torch, torch._dynamo, torch.distributed as dist
import sentinel_agent.agent  # once, before the forks
from torch import nn
warnings.simplefilter("ignore")

def train(way):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        batch = torch.full((2, 3), float("nan") if i == 2 and way != "ends" else 1.0)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if i == 2 and way in LEAVES:
            LEAVES[way]()
        loss.backward()
        if i == 2 and way == "is terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        if way == "fails in clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()

def raises():
    raise SystemExit(1)

LEAVES = {"exits": lambda: sys.exit(1), "raises SystemExit": raises, "calls exit": lambda: exit(1)}
way = None
children = []
for attempt, one in enumerate(sys.argv[1:]):
    child = os.fork()
    if child == 0:
        way = one
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        break
    children.append(child)
if way is not None:
    train(way)
else:
    for child in children:
        os.waitpid(child, 0)
"""
WAYS = ["ends", "exits", "fails in clipping", "raises SystemExit", "calls exit", "is terminated"]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Report]]:
    """Reports of processes that ended in each of the ways, as their relay got them."""
    directory = tmp_path_factory.mktemp("ends")
    (directory / "train.py").write_text(SCRIPT)
    relay = Relay(directory)
    options = '{"goodbye_seconds": 0.05, "dump_level": "stats"}'
    environment = injected(
        **{
            names.ENV_RELAY: relay.address,
            names.ENV_RUN_DIR: str(directory),
            names.ENV_COMMAND_KEY: KEY.hex(),
            names.ENV_AGENT_OPTIONS: options,
        }
    )
    ended = run_python([directory / "train.py", *WAYS], environment, cwd=directory)
    relay.take(100)
    relay.close()
    assert ended.returncode == 0, ended.stderr
    return {way: [r for r in relay.reports if getattr(r, "attempt", None) == i] for i, way in enumerate(WAYS)}


def _of(reports: list[Report], kind: type[Any]) -> list[Any]:
    return [report for report in reports if isinstance(report, kind)]


@pytest.mark.e2e
def test_an_orderly_end_is_clean(ends: dict[str, list[Report]]) -> None:
    """A script that runs to its end says goodbye, clean, with all of its rounds told."""
    reports = ends["ends"]
    assert [r.closed_by for r in _of(reports, RoundClosed)] == [ClosedBy.OPTIMIZER] * 4
    (bye,) = _of(reports, Goodbye)
    assert (bye.clean, bye.last_round, bye.reason) == (True, 3, "")
    assert _of(reports, Evidence) == []


@pytest.mark.e2e
@pytest.mark.parametrize(
    "way",
    [
        "exits",
        "fails in clipping",
        "calls exit",
    ],
)
def test_a_script_that_gives_up_over_its_loss_leaves_its_story(ends: dict[str, list[Report]], way: str) -> None:
    """The loss, the round it belongs to and an unclean goodbye are there, whether backward was reached or not."""
    reports = ends[way]
    losses = [e for e in _of(reports, Evidence) if e.phase is Phase.LOSS]
    assert {(e.round, e.step) for e in losses} == {(2, 2)}
    last = max(_of(reports, RoundClosed), key=lambda r: r.round)
    assert (last.closed_by, last.step, last.round) == (ClosedBy.EXIT, 2, 2)
    assert last.evidence == len(_of(reports, Evidence))
    (bye,) = _of(reports, Goodbye)
    assert not bye.clean
    assert bye.last_round == 2
    assert bye.reason


@pytest.mark.e2e
def test_a_script_that_is_terminated_leaves_its_story(ends: dict[str, list[Report]]) -> None:
    """A launcher that ends its ranks in the bad round does not end their evidence."""
    reports = ends["is terminated"]
    assert {e.step for e in _of(reports, Evidence)} == {2}
    assert ClosedBy.EXIT in {r.closed_by for r in _of(reports, RoundClosed)}


HELD = """
import os, signal, sys, threading, time
from sentinel_agent.errors import Health
from sentinel_agent.taps.termination import Termination

told = []
termination = Termination(lambda note: print("told", note, flush=True), Health(0, lambda _reason: None))
termination.install()
with termination.held():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(float(sys.argv[1]))
    print("finished", flush=True)
print("lived on", flush=True)
time.sleep(5)
"""


@pytest.mark.parametrize("seconds", ["0", "1"])
def test_what_is_held_is_finished_before_the_end(seconds: str) -> None:
    """SIGTERM in the middle of a part: the part is finished, then what there is is told, then the signal does what it does."""
    ended = subprocess.run(
        [sys.executable, "-c", HELD, seconds], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.splitlines() == ["finished", "told SIGTERM"], ended.stderr
    assert ended.returncode == -signal.SIGTERM
