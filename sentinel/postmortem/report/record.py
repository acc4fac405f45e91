"""A report as JSON for other programs.

Owns the shape. Numbers that are not finite are strings, so that the JSON stays valid everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from sentinel.postmortem.layers import LayerStory
from sentinel.postmortem.lint.output import finding_record
from sentinel.postmortem.report.advice import next_steps
from sentinel.postmortem.report.batch import BatchView, TensorView
from sentinel.postmortem.report.facts import Facts
from sentinel.postmortem.report.rounds import History
from sentinel.postmortem.wording import attribution_sentence, verdict_sentence

SCHEMA_VERSION = 1


def report_json(facts: Sequence[Facts]) -> str:
    """All reports in one document."""
    return json.dumps({"schema_version": SCHEMA_VERSION, "reports": [_report(one) for one in facts]}, indent=1)


def _report(facts: Facts) -> dict[str, Any]:
    incident, bundle = facts.incident, facts.bundle
    return {
        "incident": json.loads(incident.model_dump_json()) if incident else None,
        "verdict": verdict_sentence(incident) if incident else None,
        "attribution": attribution_sentence(incident) if incident else None,
        "bundle": str(bundle.path) if bundle else None,
        "partial": bundle.partial if bundle else None,
        "rounds": _rounds(facts.history) if facts.history else [],
        "batches": [_batch(batch) for batch in facts.batches],
        "nonfinite": {
            m.what: [name for name, cells in m.rows if any(c.style == "nonfinite" for c in cells)]
            for m in facts.matrices
        },
        "layers": _layers(facts.layers) if facts.layers else None,
        "replays": [json.loads(replay.model_dump_json()) for replay in facts.replays],
        "script": facts.script or None,
        "lint": [finding_record(finding) for finding in facts.lint],
        "environments": {h.rank: json.loads(h.environment.model_dump_json()) for h in facts.headers},
        "next": [{"why": step.why, "command": step.command or None} for step in next_steps(facts)],
        "missing": list(facts.missing),
    }


def _rounds(history: History) -> list[dict[str, Any]]:
    return [
        {
            "rank": cell.rank,
            "round": cell.round,
            "step": cell.step,
            "state": cell.state.value,
            "loss": _number(cell.loss),
            "loss_scale": _number(cell.loss_scale),
            "gradient_norm": _number(cell.norm),
            "gradient_absmax": _number(cell.absmax),
            "phases": [phase.value for phase in cell.phases],
        }
        for _, cell in sorted(history.cells.items(), key=lambda item: (item[1].round, item[1].rank))
    ]


def _layers(story: LayerStory) -> dict[str, Any]:
    return {
        "rank": story.rank,
        "said": list(story.sentences),
        "norms": {one.name: [[round_, _number(norm)] for round_, norm in one.points] for one in story.layers},
    }


def _batch(batch: BatchView) -> dict[str, Any]:
    return {
        "rank": batch.rank,
        "suspect": batch.suspect,
        "odd_samples": list(batch.sentences),
        "tensors": [_tensor(view) for view in batch.tensors],
    }


def _tensor(view: TensorView) -> dict[str, Any]:
    return {
        "name": view.name,
        "dtype": view.dtype,
        "shape": list(view.shape),
        "nan": view.nan,
        "inf": view.inf,
        "minimum": _number(view.minimum),
        "maximum": _number(view.maximum),
        "odd": [sample.index for sample in view.samples if sample.odd],
    }


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
