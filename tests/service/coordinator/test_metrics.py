"""Metrics: their names, their bounds, and that no peer's string can break a scrape."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from relay_client import closed, evidence, hello

from sentinel.coordinator.metric_table import METRICS
from sentinel.coordinator.metrics import ENDED_SHOWN_SECONDS, MAX_REASONS, label, new_registry
from sentinel.coordinator.run import Run
from sentinel.coordinator.snapshot import Snapshot, run_snapshot
from sentinel.incidents.events import Received
from sentinel.incidents.model import Kind
from sentinel.wire.messages import Counted, GroupSync, PartWritten

MAX_SERIES_PER_RUN = 500


def snapshot_of(*runs: Run) -> Snapshot:
    """A snapshot of these runs and an idle coordinator."""
    return Snapshot(1.0, tuple(run_snapshot(run) for run in runs), {"protocol": 2}, {}, 1, 2, 3, 4)


def busy_run(world_size: int, run_id: str = "run") -> Run:
    """A run in which every rank reported, dropped for reasons of its own, dumped, and some had faults."""
    run = Run(run_id, "key", Path("/nowhere"), 0.0)
    sync = (GroupSync("0", (), world_size, 1, 7, 8, norm=2.0, audited_dtype="float16"),)
    told = {"loss": 0.5, "loss_scale": 1024.0, "gradient_absmax": 1.0, "float16_absmax": 1.0, "sync": sync}
    told |= {"layer": "down.1", "layer_growth": 3.0}
    for rank in range(world_size):
        for report in (
            hello(rank, world_size),
            msgspec.structs.replace(closed(rank, 0), **told),
            Counted(0, rank, 0, {f"reason-{rank % 100}": 1}, {f"fault-{rank % 100}": 1}),
            PartWritten(0, rank, 1, 1, 0, f"/p/{rank}", 100, 0.2, "" if rank else "no space"),
        ):
            run.feed(Received(report), 1.0)
    run.feed(Received(evidence(0, 1)), 2.0)
    for rank in range(world_size):
        report = msgspec.structs.replace(closed(rank, 1, evidence=int(rank == 0)), at=1.5, **told)
        run.feed(Received(report), 2.0)
    return run


def scrape(*runs: Run) -> str:
    """The text a Prometheus would get."""
    return generate_latest(new_registry(lambda: snapshot_of(*runs))).decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Value of each series, by name and label values."""
    return {
        (s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples
    }


@pytest.fixture(scope="module")
def small() -> Run:
    """A busy run of 64 ranks."""
    return busy_run(64)


@pytest.mark.parametrize("world_size", [64, 16_384])
def test_series_do_not_grow_with_ranks(world_size: int, small: Run) -> None:
    """At any world size a run has at most 500 series, and as many at 16,384 ranks as at 64."""
    run = small if world_size == 64 else busy_run(world_size)
    of_run = [key for key in samples(scrape(run)) if "run" in key[1:]]
    of_small = [key for key in samples(scrape(small)) if "run" in key[1:]]
    assert len(of_run) <= MAX_SERIES_PER_RUN
    assert len(of_run) == len(of_small)


def test_every_family_is_in_the_table_and_the_table_in_the_scrape(small: Run) -> None:
    """METRICS is what documentation is made from: names, types, labels and helps agree with a real scrape."""
    families = {f.name: f for f in text_string_to_metric_families(scrape(small))}
    # The text format has no info type: it shows a gauge that carries the suffix.
    named = {spec.name + ("_info" if spec.type == "info" else ""): spec for spec in METRICS}
    assert set(families) == set(named)
    for name, family in families.items():
        spec = named[name]
        assert family.documentation == spec.help
        assert family.type == ("gauge" if spec.type == "info" else spec.type)
        assert {frozenset(s.labels) - {"le"} for s in family.samples} == {frozenset(spec.labels)}


def test_nothing_has_a_created_series(small: Run) -> None:
    """Creation timestamps would double the series, in both formats."""
    openmetrics = generate_openmetrics(new_registry(lambda: snapshot_of(small))).decode()
    assert "_created" not in scrape(small) + openmetrics
    assert openmetrics.endswith("# EOF\n")


def test_every_kind_exists_before_its_first_incident() -> None:
    """A counter that is born at 1 is invisible to increase(): all kinds, severities and states start at 0."""
    values = samples(scrape(Run("run", "key", Path("/nowhere"), 0.0)))
    for kind, severity in itertools.product(Kind, ("critical", "warning", "info")):
        assert values["sentinel_incidents_total", "run", kind.value, severity] == 0
        assert values["sentinel_incidents_open", "run", kind.value, severity] == 0
    assert values["sentinel_agents", "run", "running"] == 0


def test_values_are_those_of_the_run(small: Run) -> None:
    """What happened in the run is what a scrape shows."""
    values = samples(scrape(small))
    assert values["sentinel_incidents_total", "run", "nonfinite_gradient", "critical"] == 1
    assert values["sentinel_incidents_open", "run", "nonfinite_gradient", "critical"] == 1
    assert values["sentinel_agents", "run", "running"] == 64
    assert values["sentinel_agents_expected", "run"] == 64
    assert values["sentinel_rounds_checked_total", "run"] == 2
    assert values["sentinel_step", "run"] == 1
    assert [values["sentinel_loss", "run", stat] for stat in ("min", "mean", "max")] == [0.5, 0.5, 0.5]
    assert values["sentinel_loss_scale", "run"] == 1024
    assert values["sentinel_gradient_norm", "run"] == 2
    assert values["sentinel_gradient_headroom_ratio", "run"] == 65504 / 64
    assert values["sentinel_round_duration_seconds_count", "run"] == 1
    assert values["sentinel_round_duration_seconds_sum", "run"] == 0.5
    assert values["sentinel_dump_duration_seconds_count", "run"] == 63
    assert values["sentinel_dump_duration_seconds_bucket", "run", "0.3"] == 63
    assert values["sentinel_dump_failures_total", "run", "part_error"] == 1
    assert values["sentinel_dump_bytes_total", "run"] == 6300
    assert values["sentinel_check_duration_seconds_count", "run"] == 64 * 2
    assert values["sentinel_frames_rejected_total", "protocol"] == 2
    assert values["sentinel_frames_rejected_total", "identity"] == 0
    assert values["sentinel_connections_denied_total",] == 1


def test_an_open_incident_tells_where_it_is_until_it_is_resolved() -> None:
    """An alert's text needs rank and step: one series for each of the ten newest open incidents, none after that."""
    run = busy_run(2)
    [(key, value)] = [(k, v) for k, v in samples(scrape(run)).items() if k[0] == "sentinel_incident_info"]
    assert value == 1
    assert {"nonfinite_gradient", "critical", "rank_local", "pre_reduce", "0", "1"} <= set(key)
    for round_ in range(2, 40):
        for rank in range(2):
            run.feed(Received(closed(rank, round_)), 2.0 + round_)
    assert not [k for k in samples(scrape(run)) if k[0] == "sentinel_incident_info"]


def test_what_was_not_told_has_no_series() -> None:
    """A run without a GradScaler, float16 or losses shows no scale, headroom or loss, not one of 0."""
    run = Run("run", "key", Path("/nowhere"), 0.0)
    for rank in range(2):
        run.feed(Received(hello(rank)), 1.0)
        run.feed(Received(closed(rank, 0)), 1.0)
    shown = {k[0] for k in samples(scrape(run))}
    assert "sentinel_step" in shown
    assert not shown & {"sentinel_loss", "sentinel_loss_scale", "sentinel_gradient_headroom_ratio"}


def test_a_standing_coordinator_sheds_runs_that_ended_long_ago() -> None:
    """A run is scraped for a while after its end, so that no alert misses it, and then its series end."""
    run = busy_run(2)
    run.end(10.0)
    for age, is_shown in ((ENDED_SHOWN_SECONDS - 1, True), (ENDED_SHOWN_SECONDS + 1, False)):
        snapshot = dataclasses.replace(snapshot_of(run), taken_at=10.0 + age)
        text = generate_latest(new_registry(lambda snapshot=snapshot: snapshot)).decode()
        assert ('job_id="run"' in text) == is_shown


def test_open_ended_reasons_are_bounded_and_summed(small: Run) -> None:
    """Peers name reasons as they like; beyond a bound they are summed up, and none is lost."""
    dropped = {k: v for k, v in samples(scrape(small)).items() if k[0] == "sentinel_reports_dropped_total"}
    assert len(dropped) == MAX_REASONS + 1
    assert sum(dropped.values()) == 64


@pytest.mark.parametrize(
    "name", ["\ud800", "a\nb", 'q"uote\\', "x" * 10_000, "\x00\x1b[31m", "", "💥" * 200, "\u202eevil"]
)
def test_no_string_of_a_peer_can_break_a_scrape(name: str) -> None:
    """Surrogates, controls, quotes, nothing and too much: the scrape is whole and the label is at most 128 characters."""
    run = Run(name, "key", Path("/nowhere"), 0.0)
    run.feed(Received(Counted(0, 0, 0, {name: 1}, {})), 1.0)
    values = samples(scrape(run))
    assert values["sentinel_agents_expected", label(name)] == 0
    assert len(label(name)) <= 128
    generate_openmetrics(new_registry(lambda: snapshot_of(run))).decode()


def test_runs_that_look_alike_stay_apart() -> None:
    """Two ids that clean to the same label are two series, since a duplicate would make the scrape invalid."""
    runs = [Run(run_id, "key", Path("/nowhere"), 0.0) for run_id in ("a\nb", "a\rb", "a?b")]
    keys = Counter(k for k in (line.split(" ")[0] for line in scrape(*runs).splitlines()) if not k.startswith("#"))
    assert max(keys.values()) == 1
    assert len({k for k in samples(scrape(*runs)) if k[0] == "sentinel_agents_expected"}) == 3


def test_promtool_has_nothing_to_say(small: Run) -> None:
    """The names and helps pass Prometheus' own lint."""
    promtool = shutil.which("promtool")
    if promtool is None:
        assert os.environ.get("CI") != "true", "promtool is missing in CI: install the package prometheus"
        pytest.skip("promtool is not installed (package prometheus)")
    linted = subprocess.run(
        [promtool, "check", "metrics"], input=scrape(small), capture_output=True, text=True, timeout=30
    )
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")
