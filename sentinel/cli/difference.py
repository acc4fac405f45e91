"""``sentinel dump diff``: two ranks, or two bundles, compared.

Owns the command and what its arguments may be. The comparison is ``postmortem/difference.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sentinel.bundle.paths import rank_of_directory
from sentinel.bundle.reader import Bundle, BundleRefused
from sentinel.cli.dump import open_bundle
from sentinel.cli.options import Output
from sentinel.cli.output import ExitCode, OutputFormat, fail, put
from sentinel.incidents.describe import rank_list
from sentinel.postmortem.difference import Comparison, PartDifference, compare, describe_difference

A = Annotated[Path, typer.Argument(metavar="A", help="A bundle, or one rank of it: BUNDLE/rank-00001.")]
B = Annotated[Path, typer.Argument(metavar="B", help="Another bundle, or another rank of the same one.")]


def diff(a: A, b: B, output: Output = OutputFormat.TABLE) -> None:
    """Compare two ranks, or two bundles rank by rank: facts, batches, parameters, gradients and RNG states, bit by bit."""
    (one, of_one), (other, of_other) = _named(a), _named(b)
    pairs = _pairs(of_one, of_other, one, other)
    try:
        found = [_compare(one, other, left, right) for left, right in pairs]
    except BundleRefused as refusal:
        fail(str(refusal), "sentinel dump verify names every difference from what was committed", ExitCode.REFUSED)
    if output is OutputFormat.JSON:
        put(Comparison(parts=tuple(found)).model_dump_json(indent=1))
    else:
        put("\n\n\n".join(describe_difference(part) for part in found))


def _named(path: Path) -> tuple[Bundle, int | None]:
    """The bundle that a path names, and the rank if it names one."""
    rank = rank_of_directory(path.name)
    return (open_bundle(path), None) if rank is None else (open_bundle(path.parent), rank)


def _pairs(of_one: int | None, of_other: int | None, one: Bundle, other: Bundle) -> list[tuple[int, int]]:
    if of_one is not None and of_other is not None:
        return [(of_one, of_other)]
    if of_one is not None or of_other is not None:
        fail("one of them names a rank and the other does not", "name a rank of both, or of neither", ExitCode.USAGE)
    common = sorted(set(one.ranks) & set(other.ranks))
    if not common:
        fail(
            f"no rank is in both: {rank_list(one.ranks)} against {rank_list(other.ranks)}",
            "name ranks: BUNDLE/rank-00001",
        )
    return [(rank, rank) for rank in common]


def _compare(one: Bundle, other: Bundle, left: int, right: int) -> PartDifference:
    a, b = one.part(left), other.part(right)
    return compare(a, b, (str(a.path), str(b.path)))
