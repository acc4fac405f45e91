"""The table of all metrics a coordinator serves: what documents, dashboards, rules and the scrape itself are made from.

Owns names, types, labels and help texts. Values are read in ``metrics.py``. No label holds a rank or a parameter but those of
``sentinel_incident_info``, whose series are few and gone with their incident.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric as documentation shows it. ``name`` is the family's, without the suffix that a scrape shows."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str

    @property
    def exposed_name(self) -> str:
        """The name to query: counters end in ``_total``, infos in ``_info``."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.type, "")


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "sentinel_build", "info", ("version", "protocol"), "Version of this coordinator and of the wire protocol."
    ),
    MetricSpec(
        "sentinel_incidents",
        "counter",
        ("job_id", "kind", "severity"),
        "Incidents opened, by kind of fault and severity.",
    ),
    MetricSpec(
        "sentinel_incidents_open",
        "gauge",
        ("job_id", "kind", "severity"),
        "Incidents not resolved, by kind of fault and severity.",
    ),
    MetricSpec(
        "sentinel_incident",
        "info",
        ("job_id", "kind", "severity", "incident_id", "stage", "attribution", "step", "ranks"),
        "Newest open incidents, at most ten; gone once resolved.",
    ),
    MetricSpec("sentinel_agents", "gauge", ("job_id", "state"), "Ranks of the newest attempt, by state."),
    MetricSpec("sentinel_agents_expected", "gauge", ("job_id",), "World size of the run; 0 while unknown."),
    MetricSpec("sentinel_relays", "gauge", ("job_id",), "Connections of node relays heard of lately."),
    MetricSpec("sentinel_rounds_checked", "counter", ("job_id",), "Gradient synchronisations judged over all ranks."),
    MetricSpec(
        "sentinel_benign_skips", "counter", ("job_id",), "Rounds a GradScaler skipped in its search for a scale."
    ),
    MetricSpec(
        "sentinel_guard_rounds",
        "counter",
        ("job_id", "decision"),
        "Rounds with nonfinite gradients in which the guard skipped the step, halted, or could not decide.",
    ),
    MetricSpec("sentinel_rounds_skipped", "counter", ("job_id",), "Rounds in which any rank left its step out."),
    MetricSpec(
        "sentinel_round_duration_seconds",
        "summary",
        ("job_id",),
        "Time from the end of one round to the next, all ranks.",
    ),
    MetricSpec("sentinel_step", "gauge", ("job_id",), "Training iteration of the newest round that all ranks closed."),
    MetricSpec("sentinel_loss", "gauge", ("job_id", "stat"), "Unscaled loss over the ranks in the newest round."),
    MetricSpec(
        "sentinel_loss_scale", "gauge", ("job_id",), "Loss scale of the newest round, where there is a GradScaler."
    ),
    MetricSpec("sentinel_gradient_norm", "gauge", ("job_id",), "L2 norm of reduced gradients, largest of the ranks."),
    MetricSpec(
        "sentinel_gradient_absmax", "gauge", ("job_id",), "Largest finite magnitude a gradient reduction was given."
    ),
    MetricSpec(
        "sentinel_gradient_headroom_ratio",
        "gauge",
        ("job_id",),
        "float16's maximum over the sum of the ranks' largest gradients, where float16 is reduced; below 1 it may overflow.",
    ),
    MetricSpec(
        "sentinel_layer_gradient_growth_ratio",
        "gauge",
        ("job_id",),
        "Gradient norm of the layer that has grown most, over its own mean of some 32 rounds; known after 16.",
    ),
    MetricSpec("sentinel_reports_received", "counter", ("job_id",), "Reports of ranks and relays taken in."),
    MetricSpec(
        "sentinel_reports_dropped",
        "counter",
        ("job_id", "reason"),
        "Reports that agents and relays dropped, by reason.",
    ),
    MetricSpec(
        "sentinel_agent_faults", "counter", ("job_id", "reason"), "Faults agents and relays swallowed, by reason."
    ),
    MetricSpec("sentinel_last_report_timestamp_seconds", "gauge", ("job_id",), "When the last report came; 0 before."),
    MetricSpec("sentinel_check_duration_seconds", "summary", ("job_id",), "Time a rank spent on checks in one round."),
    MetricSpec("sentinel_classify_duration_seconds", "summary", ("job_id",), "Time the core spent on one event."),
    MetricSpec("sentinel_dump_duration_seconds", "histogram", ("job_id",), "Time a rank took to write its part."),
    MetricSpec("sentinel_dump_bytes", "counter", ("job_id",), "Bytes of parts that ranks wrote."),
    MetricSpec("sentinel_dump_failures", "counter", ("job_id", "reason"), "Parts and bundles that failed, by reason."),
    MetricSpec(
        "sentinel_bundles_committed", "counter", ("job_id",), "Manifests written, partial and repeated ones too."
    ),
    MetricSpec(
        "sentinel_frames_rejected", "counter", ("reason",), "Messages refused before they reached a run, by reason."
    ),
    MetricSpec("sentinel_connections_denied", "counter", (), "Handshakes refused because the key is not allowed."),
    MetricSpec("sentinel_frames_acknowledged", "counter", (), "Critical frames acknowledged to relays."),
    MetricSpec(
        "sentinel_answers_undeliverable", "counter", (), "Answers whose relay was gone; it asks again when back."
    ),
    MetricSpec("sentinel_coordinator_faults", "counter", ("reason",), "Faults of the coordinator itself, by reason."),
    MetricSpec("sentinel_store_backlog_rows", "gauge", (), "Rows that wait to be committed to the database."),
)
SPECS = {spec.name: spec for spec in METRICS}
"""The table by family name."""
