"""A fault of the agent's own is counted, ends in silence after the fifth, and never reaches the training."""

from __future__ import annotations

import io

import pytest

from sentinel_agent.errors import MAX_FAULTS, Health


def _broken(*_args: object) -> int:
    raise ValueError("no such thing")


@pytest.fixture
def heard() -> list[str]:
    """Reasons given to ``on_disable``."""
    return []


@pytest.fixture
def health(heard: list[str]) -> Health:
    """Health of rank 3."""
    return Health(3, heard.append)


def test_results_and_arguments_pass_through(health: Health) -> None:
    """A guarded function is called as it is, and its result comes back."""
    assert health.guarded("sum", lambda a, *, b: a + b)(1, b=2) == 3


def test_a_fault_is_counted_by_place_and_type(health: Health) -> None:
    """Each exception is counted under its tap and its class, and the caller gets None."""
    assert health.guarded("wire", _broken)() is None
    health.guarded("wire", _broken)()
    health.guarded("clip", lambda: 1 / 0)()
    assert health.faults == {"wire:ValueError": 2, "clip:ZeroDivisionError": 1}
    assert health.active


def test_the_fifth_fault_disables_loudly_once(
    health: Health, heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Five faults at any taps switch the agent off: one line on stderr, one call, and taps are not entered again."""
    calls: list[int] = []

    def counting() -> None:
        calls.append(1)
        _broken()

    taps = [health.guarded(site, counting) for site in ("wire", "loss", "clip")]
    for i in range(MAX_FAULTS * 3):
        taps[i % 3]()
    assert len(calls) == MAX_FAULTS == 5
    assert not health.active
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("sentinel: agent of rank 3 switched itself off")
    assert "ValueError: no such thing" in printed.err
    assert printed.out == ""
    assert len(heard) == 1
    assert "5 faults" in heard[0]


def test_a_disabled_agent_does_nothing(health: Health, heard: list[str]) -> None:
    """After disable a guarded function is not called, and a second reason is not announced."""
    health.disable("first")
    health.disable("second")
    assert health.guarded("wire", lambda: 1)() is None
    assert heard == ["first"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_the_user_s_own_interrupt_passes(health: Health, stop: type[BaseException]) -> None:
    """Ctrl-C or an exit that arrives inside a tap is not ours to swallow."""

    def interrupted() -> None:
        raise stop

    with pytest.raises(stop):
        health.guarded("wire", interrupted)()
    assert not health.faults


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError], ids=["broken pipe", "closed"])
def test_a_broken_stderr_does_not_reach_the_training(
    health: Health, heard: list[str], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """If nobody can be told on stderr, the agent still switches off and reports it, and the training goes on."""

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise error("gone")

    monkeypatch.setattr("sys.stderr", Broken())
    tap = health.guarded("wire", _broken)
    for _ in range(MAX_FAULTS):
        tap()
    assert not health.active
    assert len(heard) == 1


def test_a_long_message_is_cut(health: Health, heard: list[str]) -> None:
    """An exception whose text is a whole tensor does not fill the log."""

    def verbose() -> None:
        raise RuntimeError("x" * 100_000)

    for _ in range(MAX_FAULTS):
        health.guarded("wire", verbose)()
    assert len(heard[0]) < 400


def test_a_message_of_several_lines_is_announced_on_one(health: Health, heard: list[str]) -> None:
    """torch's errors run over many lines; what people see is one line."""

    def verbose() -> None:
        raise RuntimeError("first\nsecond\nthird")

    for _ in range(MAX_FAULTS):
        health.guarded("wire", verbose)()
    assert "\n" not in heard[0]
