"""The order in which a bundle is questioned: the step as it was, again, in other precisions, with the others, sample by sample.

Owns which trials are run, and the record made of them. What they mean is ``verdict.py``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from sentinel.bundle.reader import Bundle
from sentinel.bundle.replayed import Found, Precision, ReplayRecord, ReplayRequest, TrialOutcome
from sentinel_agent.environment import HIDDEN
from sentinel_agent.replay.forking import run_trial
from sentinel_agent.replay.inspection import inspect_batch
from sentinel_agent.replay.recording import Recording
from sentinel_agent.replay.samples import Blamed, bisect, confirm
from sentinel_agent.replay.trial import Pace, Trial
from sentinel_agent.replay.verdict import Facts, found, judge

MAX_PEERS: Final = 16
_OTHER_PACES: Final[dict[Pace, str]] = {
    "slow": "once more, with every backward on the way",
    "jump": "once more, from the first forward on",
}
_PACE_WORDS: Final[dict[Pace, str]] = {
    "fast": "the script's loop without gradients did not get there",
    "slow": "the script's loop with gradients did not get there",
    "jump": "the script's first step with the recorded inputs did not get there",
}
Progress = Callable[[str], None]


class Investigation:
    """One replay of one rank's part. ``progress`` hears, in a few words, what is being tried."""

    def __init__(self, bundle: Bundle, rank: int, request: ReplayRequest, scratch: Path, progress: Progress) -> None:
        self._bundle = bundle
        self._request = request
        self._scratch = scratch
        self._progress = progress
        self._recording = Recording(bundle, rank)
        self._plain = Trial(
            name="",
            rank=rank,
            entry=request.entry,
            script=request.script,
            timeout=request.timeout,
        )
        self._trials: list[TrialOutcome] = []
        self._cells: dict[Precision, Found] = dict.fromkeys(("same", "fp32", "bf16", "fp16"), "not_run")
        self._anomaly = ""
        self._guilty: list[int] = []
        self._why: list[str] = []

    def run(self) -> ReplayRecord:
        """Run every trial that is wanted and needed; the record of what was found."""
        began = time.monotonic()
        same = self._first()
        self._cells["same"] = found(same)
        again = together = None
        blamed = Blamed()
        if same.status == "replayed":
            again = self._try("again", "once more, to compare the bits", traced=False)
            if not same.nonfinite and self._recorded_nonfinite and not self._recording.gradients:
                together = self._with_peers("same")
            self._precisions(same, together)
            if self._request.anomaly:
                self._anomaly = self._try(
                    "anomaly", "under torch's anomaly detection", traced=False, anomaly=True
                ).anomaly
            if self._request.samples and same.nonfinite:
                blamed = self._blame_samples(same)
        facts = Facts(
            header=self._recording.header,
            same=same,
            again=again,
            together=together,
            guilty=tuple(self._guilty),
            precision=self._cells,
            recorded_nonfinite=self._recorded_nonfinite,
            samples=blamed.samples,
            confirmed=blamed.confirmed,
        )
        return self._record(facts, time.monotonic() - began)

    def _anomalies(self) -> tuple[str, ...]:
        """What torch's own anomaly detection said."""
        return (f"anomaly detection: {self._anomaly}",) if self._anomaly else ()

    def _redacted(self) -> tuple[str, ...]:
        """Arguments that the bundle does not have may matter."""
        hidden = any(HIDDEN in argument for argument in self._recording.header.environment.argv)
        return ("the script's arguments are redacted in the bundle: it ran with placeholders",) if hidden else ()

    @property
    def _recorded_nonfinite(self) -> bool:
        header = self._recording.header
        gradients = any(one.nan or one.inf for one in header.gradient_statistics)
        return gradients or bool(header.raw_gradients) or (header.loss is not None and header.loss - header.loss != 0)

    def _first(self) -> TrialOutcome:
        """The step as it was, reached by the first pace that gets there; the other trials then go at the same pace."""
        same = self._try("same", "the step as it was")
        for pace, words in _OTHER_PACES.items():
            if same.status == "replayed" or self._request.entry is not None:
                break
            self._why.append(f"{_PACE_WORDS[self._plain.pace]}: {same.reason}")
            before, self._plain = self._plain, replace(self._plain, pace=pace)
            other = self._try(f"same-{pace}", words)
            if other.status == "replayed":
                return other
            self._plain = before if pace == "jump" else self._plain
        return same

    def _try(self, name: str, words: str, **changes: object) -> TrialOutcome:
        self._progress(words)
        trial = replace(self._plain, name=name, **changes)  # type: ignore[arg-type]
        outcome = run_trial(self._recording, trial, self._scratch)
        self._trials.append(outcome)
        return outcome

    def _precisions(self, same: TrialOutcome, together: TrialOutcome | None) -> None:
        """The other precisions. A script that uses no half precision is in float32 already."""
        fault = together if together is not None and together.nonfinite else same
        if together is not None:
            self._cells["same"] = found(together)
        for precision in self._request.precisions:
            if precision == "same":
                continue
            if precision == "fp32" and not fault.low_precision:
                self._cells[precision] = self._cells["same"]
            else:
                self._cells[precision] = self._cell(precision, with_peers=together is not None)

    def _cell(self, precision: Precision, *, with_peers: bool) -> Found:
        """One cell of the precision table; why a run failed goes to the notes."""
        words = f"in {precision}"
        outcome = self._with_peers(precision) if with_peers else self._try(precision, words, precision=precision)
        if outcome is not None and outcome.status != "replayed":
            self._why.append(f"in {precision}: {outcome.reason}")
        return found(outcome)

    def _with_peers(self, precision: Precision) -> TrialOutcome | None:
        """The step with what the other ranks give to each reduction, recomputed from their own parts. None if that fails."""
        peers: list[Path] = []
        others = [rank for rank in self._bundle.ranks if rank != self._plain.rank][:MAX_PEERS]
        for rank in others:
            name = f"peer-{precision}-{rank}"
            path = self._scratch / name / "contributions.safetensors"
            self._progress(f"rank {rank}'s contribution" + ("" if precision == "same" else f" in {precision}"))
            trial = replace(self._plain, name=name, rank=rank, precision=precision, contributions=path)
            outcome = run_trial(Recording(self._bundle, rank), trial, self._scratch)
            if outcome.nonfinite and precision == "same":
                self._guilty.append(rank)
            if outcome.status == "replayed" and path.exists():
                peers.append(path)
        if not peers or self._guilty:
            return None
        words = "the step with the other ranks' contributions"
        return self._try(f"together-{precision}", words, precision=precision, peers=tuple(peers))

    def _blame_samples(self, same: TrialOutcome) -> Blamed:
        op, size = same.first_bad_op, same.batch_size
        if size is None or size < 2 or op is None or (op.what or "").startswith(("parameter", "buffer")):
            return Blamed()
        rows = op.rows or ()
        if rows and len(rows) < size:
            blamed = confirm(rows, size, self._fails)
            return blamed if blamed.confirmed else bisect(size, self._fails)
        noted = tuple(sorted({one.sample for one in self._recording.header.sample_findings if one.sample < size}))
        if noted and len(noted) < size:
            blamed = confirm(noted, size, self._fails)
            if blamed.confirmed:
                return blamed
        return bisect(size, self._fails) if not rows else Blamed()

    def _fails(self, replaced: tuple[int, ...], by: int) -> bool | None:
        number = len(self._trials)
        words = f"with {len(replaced)} sample{'s' if len(replaced) > 1 else ''} replaced"
        outcome = self._try(f"samples-{number}", words, replaced=replaced, by=by, traced=False)
        return outcome.nonfinite if outcome.status == "replayed" else None

    def _record(self, facts: Facts, seconds: float) -> ReplayRecord:
        verdict = judge(facts)
        header = self._recording.header
        shown = facts.together if facts.together is not None and facts.together.nonfinite else facts.same
        return ReplayRecord(
            bundle=self._bundle.id,
            rank=self._plain.rank,
            round=header.round,
            step=header.step,
            reproduced=shown.nonfinite,
            precision=dict(self._cells),
            first_bad_op=shown.first_bad_op,
            samples=facts.samples,
            samples_confirmed=facts.confirmed,
            cause=verdict.cause,
            verdict=verdict.name,
            reason=verdict.reason,
            evidence=verdict.evidence,
            refuted_by=verdict.refuted_by,
            batch=inspect_batch(self._bundle, self._recording),
            trials=tuple(self._trials),
            diverted=facts.same.diverted,
            notes=(*self._why, *self._redacted(), *facts.same.notes, *self._anomalies()),
            seconds=round(seconds, 2),
            replayed_at=time.time(),
        )
