"""Callbacks right after a module was imported, without importing it and without a trace in the module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel_agent.inject.lazy import AfterImport, after_import


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "watched_package"
    package.mkdir()
    (package / "__init__.py").write_text("READY = True\n")
    (package / "inner.py").write_text("def function():\n    return 1\n\n\nREADY = True\n")
    (package / "broken.py").write_text("READY = True\nraise KeyError('of its own')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.startswith("watched_package")]:
        del sys.modules[name]


def test_the_callback_comes_after_the_module_has_run() -> None:
    """It gets the whole module, once, and nothing is imported before somebody imports it."""
    ready: list[bool] = []
    after_import({"watched_package.inner": lambda module: ready.append(module.READY)})
    assert "watched_package" not in sys.modules
    importlib.import_module("watched_package.inner")
    importlib.import_module("watched_package.inner")
    assert ready == [True]


def test_a_replacement_made_by_the_callback_is_what_others_import() -> None:
    """``from module import name`` right after gets what the callback put there."""
    after_import({"watched_package.inner": lambda module: setattr(module, "function", lambda: 2)})
    from watched_package.inner import function  # type: ignore[import-not-found]

    assert function() == 2


def test_a_module_imported_before_is_called_back_at_once() -> None:
    """Attaching late is the same as early."""
    module = importlib.import_module("watched_package.inner")
    seen: list[types.ModuleType] = []
    before = list(sys.meta_path)
    after_import({"watched_package.inner": seen.append})
    assert seen == [module]
    assert sys.meta_path == before


def test_the_module_does_not_show_that_it_was_watched() -> None:
    """Loader and spec are the import system's own, so sources are found and resources load."""
    after_import({"watched_package.inner": lambda module: None})
    module = importlib.import_module("watched_package.inner")
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert "return 1" in inspect.getsource(module.function)
    assert importlib.reload(module) is module


def test_an_error_of_the_module_is_the_module_s() -> None:
    """A module that raises while it is imported raises that, and there is no callback."""
    seen: list[types.ModuleType] = []
    after_import({"watched_package.broken": seen.append})
    with pytest.raises(KeyError, match="of its own"):
        importlib.import_module("watched_package.broken")
    assert seen == []


def test_a_mere_look_for_the_module_does_not_use_the_callback_up() -> None:
    """``importlib.util.find_spec``, as libraries use to see what is installed, loads nothing; the import that follows counts."""
    seen: list[str] = []
    after_import({"watched_package.inner": lambda module: seen.append(module.__name__)})
    assert importlib.util.find_spec("watched_package.inner") is not None
    assert seen == []
    importlib.import_module("watched_package.inner")
    assert seen == ["watched_package.inner"]


def test_a_second_attempt_after_an_error_is_called_back() -> None:
    """A module that failed once, for want of a library say, and is imported again later, is watched then."""
    seen: list[str] = []
    after_import({"watched_package.broken": lambda module: seen.append(module.__name__)})
    with pytest.raises(KeyError):
        importlib.import_module("watched_package.broken")
    source = Path(importlib.util.find_spec("watched_package").submodule_search_locations[0]) / "broken.py"  # type: ignore
    source.write_text("READY = 'mended'\n")
    importlib.invalidate_caches()
    importlib.import_module("watched_package.broken")
    assert seen == ["watched_package.broken"]


def test_other_modules_pass() -> None:
    """The finder has no opinion on names it was not given, nor on one that does not exist."""
    finder = AfterImport({"no_such_module": lambda module: None})
    assert finder.find_spec("json", None) is None
    sys.meta_path.insert(0, finder)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")


def test_two_registrations_are_both_called() -> None:
    """Registering a second callback for a module does not take the first away."""
    seen: list[str] = []
    after_import({"watched_package.inner": lambda module: seen.append("first")})
    after_import({"watched_package.inner": lambda module: seen.append("second")})
    importlib.import_module("watched_package.inner")
    assert sorted(seen) == ["first", "second"]
