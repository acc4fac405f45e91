"""What end-to-end tests share: the trainings of a module's tests, run two at a time ahead of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from loading import load_script
from training_run import Ahead, Case, Ran


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """An interpreter that need not import torch, for modules with many trainings whose start is nothing they test."""
    warm = load_script("benchmarks/warm").Warm()
    yield str(warm.python)
    warm.close()


@pytest.fixture(scope="module")
def ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    """The trainings of every ``case`` that this module's selected tests are parametrised with.

    A module that says ``WARM = True`` has them run by ``warm_python``.
    """
    selected = [item for item in request.session.items if item.nodeid.startswith(f"{request.node.nodeid}::")]
    parameters = [item.callspec.params for item in selected if hasattr(item, "callspec")]
    cases = [value for given in parameters for value in given.values() if isinstance(value, Case)]
    warm = getattr(request.module, "WARM", False)
    python = request.getfixturevalue("warm_python") if warm else sys.executable
    running = Ahead(cases, tmp_path_factory.mktemp("trainings"), python)
    yield running
    running.close()


@pytest.fixture
def ran(ahead: Ahead, case: Case) -> Ran:
    """The training of this test's ``case``."""
    return ahead.of(case)
