"""A bundle as a page of text: whose parts are here, what the batches were, odd samples, statistics.

Owns the page. Reading and refusing is ``bundle/reader.py``'s; comparing with the manifest is ``bundle/verify.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sentinel.bundle.manifest import BatchEntry, PartHeader, TensorStatistics
from sentinel.bundle.reader import Bundle, Part
from sentinel.incidents.describe import rank_list
from sentinel.postmortem.layers import layer_story
from sentinel.postmortem.samples import sample_sentences
from sentinel.postmortem.text import columns, labelled, number, printable
from sentinel.wire.names import MANIFEST

RANKS_IN_FULL = 4
PARTS_SHOWN = 64
STATISTICS_SHOWN = 12
SAMPLES_SHOWN = 8
_STATISTICS = ("TENSOR", "DTYPE", "SHAPE", "NAN", "INF", "MIN", "MAX", "MEAN", "STD")


def describe_bundle(bundle: Bundle, ranks: Sequence[int] | None = None) -> str:
    """The page, with the parts of ``ranks`` in full (default: the first few that hold something odd). Raises BundleRefused."""
    parts = bundle.parts
    shown = [rank for rank in sorted(parts) if rank in ranks] if ranks else _telling(parts)
    blocks = [_head(bundle), _parts(bundle), *_growth(parts), *(_part(parts[rank].header) for rank in shown)]
    if len(shown) < len(parts) and not ranks:
        blocks.append(f"Another rank in full: sentinel dump show {printable(str(bundle.path), 400)} --rank N")
    return "\n\n".join(blocks)


def _growth(parts: dict[int, Part]) -> list[str]:
    """What the layers' norms say, if anything."""
    story = layer_story(part.header for _, part in sorted(parts.items()))
    sentences = story.sentences if story is not None else ()
    return ["\n".join(["Layers", *(f"  {printable(sentence, 400)}" for sentence in sentences)])] if sentences else []


def _telling(parts: dict[int, Part]) -> list[int]:
    """Ranks with an odd sample or a nonfinite gradient or parameter; if there are none, the lowest rank."""
    odd = [rank for rank in sorted(parts) if _is_odd(parts[rank].header)]
    return odd[:RANKS_IN_FULL] or sorted(parts)[:1]


def _is_odd(header: PartHeader) -> bool:
    statistics = (*header.gradient_statistics, *header.parameter_statistics)
    return bool(header.sample_findings) or any(s.nan or s.inf for s in statistics)


def _head(bundle: Bundle) -> str:
    manifest = bundle.manifest
    if manifest is None:
        state = f"partial: no {MANIFEST} was written; parts of {rank_list(bundle.ranks)} are here"
        return labelled([("bundle", str(bundle.path)), ("state", state)])
    missing = (
        f"partial: nothing whole from {rank_list(manifest.missing_ranks)}" if not manifest.complete else "complete"
    )
    return labelled(
        [
            ("bundle", str(bundle.path)),
            ("state", missing),
            ("run", f"{manifest.run_id}, attempt {manifest.attempt}, {manifest.world_size} ranks"),
            ("round", f"{manifest.round} (step {manifest.step})"),
            ("incidents", ", ".join(manifest.incidents) or "none"),
        ]
    )


def _parts(bundle: Bundle) -> str:
    header = ("RANK", "HOST", "LOSS", "SCALE", "BATCHES", "ODD SAMPLES", "NONFINITE GRADIENTS", "NONFINITE PARAMETERS")
    parts = sorted(bundle.parts.items())
    more = f"\n  … and {len(parts) - PARTS_SHOWN} more (all of them: -o json)" if len(parts) > PARTS_SHOWN else ""
    return f"Parts\n{columns(header, (_summary(part.header) for _, part in parts[:PARTS_SHOWN]), indent='  ')}{more}"


def _summary(header: PartHeader) -> tuple[str, ...]:
    return (
        str(header.rank),
        header.environment.host,
        number(header.loss),
        number(header.loss_scale),
        str(len(header.batches)),
        str(len(header.sample_findings)),
        _share_nonfinite(header.gradient_statistics),
        _share_nonfinite(header.parameter_statistics),
    )


def _part(header: PartHeader) -> str:
    when = "after" if header.state_after_step else "before"
    lines = [f"Rank {header.rank}: {printable(header.reason)}; parameters as they were {when} the step"]
    lines += [_batch(batch) for batch in header.batches]
    sentences = sample_sentences(header)
    lines += [f"  {printable(sentence, 300)}" for sentence in sentences[:SAMPLES_SHOWN]]
    if len(sentences) > SAMPLES_SHOWN:
        lines.append(f"  … and {len(sentences) - SAMPLES_SHOWN} more odd samples")
    for title, found in (
        ("batch tensors", header.batch_statistics),
        ("gradients", header.gradient_statistics),
        ("parameters and buffers", header.parameter_statistics),
    ):
        if found:
            lines += ["", _statistics(title, found)]
    return "\n".join(lines)


def _batch(batch: BatchEntry) -> str:
    indices = batch.sample_indices
    shown = (
        f", data set indices {', '.join(str(i) for i in indices[:8])}{' …' if len(indices) > 8 else ''}"
        if indices
        else ""
    )
    source = "caught at the DataLoader" if batch.source == "loader" else "caught at the model's forward"
    changed = f", changed in place afterwards: {', '.join(batch.mutated)}" if batch.mutated else ""
    omitted = f", left out: {', '.join(batch.omitted)}" if batch.omitted else ""
    return printable(f"  batch b{batch.index}, round {batch.round}, {source}{shown}{changed}{omitted}", 400)


def _statistics(title: str, found: Sequence[TensorStatistics]) -> str:
    """The nonfinite tensors first, then the others, as many as fit a page."""
    ordered = sorted(found, key=lambda s: not (s.nan or s.inf))
    rest = len(ordered) - STATISTICS_SHOWN
    more = f"\n    … and {rest} more (all of them: -o json)" if rest > 0 else ""
    return f"  {title}\n{columns(_STATISTICS, _rows(ordered[:STATISTICS_SHOWN]), indent='    ')}{more}"


def _rows(found: Iterable[TensorStatistics]) -> Iterable[tuple[str, ...]]:
    for s in found:
        shape = "x".join(str(n) for n in s.shape) or "scalar"
        numbers = (number(value) for value in (s.minimum, s.maximum, s.mean, s.std))
        yield (s.name, s.dtype, shape, str(s.nan), str(s.inf), *numbers)


def _share_nonfinite(found: Sequence[TensorStatistics]) -> str:
    return f"{sum(1 for s in found if s.nan or s.inf)} of {len(found)}" if found else "-"
