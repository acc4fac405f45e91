"""Commands that act: acknowledging during and after a run, asking for a dump, removing bundles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import story
from relay_client import RelayClient, closed, fault_of, hello, wait_until

from sentinel.coordinator.app import Coordinator
from sentinel.coordinator.config import CoordinatorSettings
from sentinel.coordinator.store import IncidentReader

Command = Callable[..., Any]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Coordinator]:
    """A running coordinator with pages, for the run called ``run``."""
    with Coordinator(CoordinatorSettings(run_dir=tmp_path / "live", run_id="run")) as running:
        yield running


@pytest.fixture
def relay(live: Coordinator) -> Iterator[RelayClient]:
    """A relay of two ranks, one of which had a fault in round 0."""
    client = RelayClient(live.join)
    client.send([hello(0), hello(1)])
    client.await_ack(client.send(fault_of(1)))
    yield client
    client.close()


def stored(run_dir: Path) -> Any:
    """The one incident on disk."""
    with IncidentReader(run_dir) as reader:
        (incident,) = reader.incidents()
    return incident


def test_an_incident_is_acknowledged_while_the_run_goes_on(
    sentinel: Command, live: Coordinator, relay: RelayClient
) -> None:
    """The word goes to the coordinator, which keeps it; no token has to be given by who can read the run directory."""
    ran = sentinel("incidents", "ack", "a0", "--run-dir", live.run_dir, "--by", "ada", "--note", "seen")
    assert (ran.code, ran.err) == (0, "")
    assert "acknowledged by ada" in ran.out
    wait_until(lambda: stored(live.run_dir).acknowledged_by == "ada", "the word is on disk")
    assert stored(live.run_dir).acknowledged_note == "seen"


def test_an_incident_is_acknowledged_after_the_run(sentinel: Command, run_dir: Path) -> None:
    """Nobody runs any more: the word is written into the database itself, and its log says so."""
    ran = sentinel("incidents", "ack", story.incident().id, "--run-dir", run_dir, "--by", "ada", "-o", "json")
    assert ran.code == 0
    assert json.loads(ran.out)["acknowledged_by"] == "ada"
    assert stored(run_dir).acknowledged_by == "ada"
    with IncidentReader(run_dir) as reader:
        assert [e.event.by for e in reader.events(story.RUN) if type(e.event).__name__ == "Acknowledged"] == ["ada"]


def test_an_ended_run_of_a_standing_coordinator_is_acknowledged_too(sentinel: Command, run_dir: Path) -> None:
    """A coordinator that took up a database keeps words on incidents of runs that it no longer watches."""
    with Coordinator(CoordinatorSettings(run_dir=run_dir)) as running:
        assert sentinel("incidents", "ack", "a0", "--run-dir", run_dir, "--by", "ada").code == 0
        wait_until(lambda: stored(run_dir).acknowledged_by == "ada", "the word is on disk")
        assert running.incidents()[0].acknowledged_by == "ada"


def test_a_word_outlives_a_restart(sentinel: Command, tmp_path: Path) -> None:
    """A standing coordinator that takes up a run from its log finds the word there."""
    settings = CoordinatorSettings(run_dir=tmp_path / "standing")
    with Coordinator(settings) as first:
        relay = RelayClient(first.join)
        relay.send([hello(0), hello(1)])
        relay.await_ack(relay.send(fault_of(1)))
        assert sentinel("incidents", "ack", "a0", "--run-dir", first.run_dir, "--by", "ada").code == 0
        relay.close()
    with Coordinator(settings) as second:
        assert second.incidents()[0].acknowledged_by == "ada"


def test_over_http_the_token_is_needed(sentinel: Command, live: Coordinator, relay: RelayClient) -> None:
    """An address alone lets nobody act: exit code 5, with a hint."""
    ran = sentinel("incidents", "ack", "a0", "--http", live.http_url)
    assert (ran.code, ran.out) == (5, "")
    assert "--token" in ran.err


def test_a_dump_is_asked_for(sentinel: Command, live: Coordinator, relay: RelayClient) -> None:
    """Every rank is told one and the same round, which none of them has closed."""
    relay.send([closed(0, 5), closed(1, 5)])
    wait_until(lambda: live.status()[0].last_round == 5, "round 5 is known")  # type: ignore[index]
    ran = sentinel("dump", "now", "--run-dir", live.run_dir, "-o", "json")
    planned = json.loads(ran.out)
    assert (ran.code, planned["ranks"]) == (0, [0, 1])
    assert planned["round"] > 5
    assert planned["bundle"] == f"bundles/a0-r{planned['round']:06d}"


def test_no_dump_can_be_asked_for_after_the_run(sentinel: Command, run_dir: Path) -> None:
    """Exit code 4: nobody is there to write anything."""
    ran = sentinel("dump", "now", "--run-dir", run_dir)
    assert (ran.code, ran.out) == (4, "")
    assert "no coordinator is running" in ran.err


def test_a_dump_of_a_run_without_ranks_is_refused_in_a_line(sentinel: Command, live: Coordinator) -> None:
    """The coordinator's own words are shown."""
    ran = sentinel("dump", "now", "--run-dir", live.run_dir, "--run-id", "run")
    assert (ran.code, ran.out) == (1, "")
    assert "no rank of this run can be asked" in ran.err


def test_bundles_are_removed_and_incidents_stay(sentinel: Command, run_dir: Path) -> None:
    """``rm --yes`` removes the directory; the incident is still listed."""
    bundle = run_dir / "bundles" / story.BUNDLE
    assert sentinel("dump", "rm", bundle, "--yes").code == 0
    assert not bundle.exists()
    assert sentinel("incidents", "ls", "--run-dir", run_dir).code == 3


def test_only_bundles_are_removed(sentinel: Command, run_dir: Path) -> None:
    """A directory that is none, or a link to one, is refused, and nothing of several is removed."""
    bundle = run_dir / "bundles" / story.BUNDLE
    link = run_dir / "bundles" / "a0-r000099"
    link.symlink_to(bundle)
    for other in (run_dir, run_dir / "absent", link):
        assert sentinel("dump", "rm", bundle, other, "--yes").code in (1, 5)
    assert bundle.is_dir()
    assert (run_dir / "sentinel.db").exists()
