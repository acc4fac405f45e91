"""A computation on a thread of its own gives its caller what it would have given at once."""

from __future__ import annotations

import threading

import pytest

from sentinel_agent.beside import beside


def test_it_runs_on_another_thread() -> None:
    """The caller goes on, and gets the result when it asks."""
    go_on = threading.Event()
    result = beside(lambda: (go_on.wait(10), threading.get_ident()))
    go_on.set()
    waited, where = result()
    assert waited
    assert where != threading.get_ident()


def test_a_failure_is_the_callers() -> None:
    """What the computation raises is raised where its result is asked for."""

    def fail() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        beside(fail)()


def test_without_threads_the_caller_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started the caller computes itself."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert beside(threading.get_ident)() == threading.get_ident()
