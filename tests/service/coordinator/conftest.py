"""Coordinators to talk to, and relays to talk with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from relay_client import RelayClient

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings


@pytest.fixture
def settings(tmp_path: Path) -> CoordinatorSettings:
    """An embedded coordinator's settings, without pages."""
    return CoordinatorSettings(run_dir=tmp_path / "run", run_id="run", http_enabled=False)


@pytest.fixture
def coordinator(settings: CoordinatorSettings) -> Iterator[Coordinator]:
    """A started embedded coordinator for the run called ``run``."""
    with Coordinator(settings) as started:
        yield started


@pytest.fixture
def relays() -> Iterator[Callable[..., RelayClient]]:
    """Makes relay clients and closes them at the end."""
    made: list[RelayClient] = []

    def make(*args: object, **kwargs: object) -> RelayClient:
        made.append(RelayClient(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for relay in made:
        relay.close()
