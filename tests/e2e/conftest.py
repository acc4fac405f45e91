"""What end-to-end tests share: the trainings of a module's tests, run two at a time ahead of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from training_run import Ahead, Case, Ran


@pytest.fixture(scope="module")
def ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    """The trainings of every ``case`` that this module's selected tests are parametrised with."""
    selected = [item for item in request.session.items if item.nodeid.startswith(f"{request.node.nodeid}::")]
    parameters = [item.callspec.params for item in selected if hasattr(item, "callspec")]
    cases = [value for given in parameters for value in given.values() if isinstance(value, Case)]
    running = Ahead(cases, tmp_path_factory.mktemp("trainings"))
    yield running
    running.close()


@pytest.fixture
def ran(ahead: Ahead, case: Case) -> Ran:
    """The training of this test's ``case``."""
    return ahead.of(case)
