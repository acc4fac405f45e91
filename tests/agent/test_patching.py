"""Replacements of torch's functions: once each, recognisable, and put back without a trace."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sentinel_agent import patching


class Owner:
    def double(self, value: int) -> int:
        """Twice the value."""
        return 2 * value


class Heir(Owner):
    pass


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    patching.restore()


def _plus_one(original: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: original(*args) + 1


def test_a_wrapped_function_keeps_its_name_and_docstring() -> None:
    """The replacement looks like the original to whoever inspects it, and calls it."""
    original = Owner.double
    assert patching.wrap(Owner, "double", _plus_one)
    assert Owner().double(3) == 7
    assert Owner.double.__name__ == "double"
    assert Owner.double.__doc__ == "Twice the value."
    assert Owner.double.__wrapped__ is original  # type: ignore[attr-defined]


def test_wrapping_twice_wraps_once() -> None:
    """A function that is ours already is left as it is."""
    assert patching.wrap(Owner, "double", _plus_one)
    assert not patching.wrap(Owner, "double", _plus_one)
    assert Owner().double(3) == 7


def test_a_missing_function_is_no_error() -> None:
    """Another version of torch may lack a name: then there is nothing to replace."""
    assert not patching.wrap(Owner, "triple", _plus_one)
    assert not hasattr(Owner, "triple")


def test_restore_puts_the_identical_functions_back() -> None:
    """After restore the very objects of before are in place, however many were replaced."""
    module = types.ModuleType("some_module")
    vars(module)["double"] = original = Owner.double
    patching.wrap(Owner, "double", _plus_one)
    patching.wrap(module, "double", _plus_one)
    patching.restore()
    assert Owner.double is original
    assert vars(module)["double"] is original
    patching.restore()
    assert Owner.double is original


def test_what_somebody_wrapped_after_us_stays() -> None:
    """A profiler that wrapped our wrapper keeps its own; taking ours from under it is not possible, taking its away is not ours."""
    original = Owner.double
    patching.wrap(Owner, "double", _plus_one)
    ours = Owner.double

    def theirs(self: Any, value: int) -> int:
        return ours(self, value) * 10

    Owner.double = theirs  # type: ignore[method-assign]
    try:
        patching.restore()
        assert Owner.double is theirs
        assert Owner().double(3) == 70
    finally:
        Owner.double = original  # type: ignore[method-assign]


def test_a_name_that_was_inherited_is_inherited_again() -> None:
    """Where a class had no such name of its own, it has none after restore."""
    patching.wrap(Heir, "double", _plus_one)
    assert Heir().double(3) == 7
    assert Owner().double(3) == 6
    patching.restore()
    assert Heir().double(3) == 6
    assert "double" not in vars(Heir)
