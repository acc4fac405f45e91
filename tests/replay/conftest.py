"""What tests of replay share: bundles made by real trainings, once a session."""

from __future__ import annotations

from typing import Any

import pytest
from recorded import Record, Recorded, train


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Train a script of ``tests/replay/scripts`` under the launcher, once for each set of arguments."""
    made: dict[tuple[Any, ...], Recorded] = {}

    def run(script: str, *arguments: str, ranks: int = 2, **options: Any) -> Recorded:
        key = (script, arguments, ranks, tuple(options.items()))
        if key not in made:
            made[key] = train(tmp_path_factory.mktemp("train"), script, arguments, ranks, options)
        return made[key]

    return run
