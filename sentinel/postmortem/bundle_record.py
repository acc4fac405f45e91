"""A bundle as JSON for other programs: ``sentinel dump ls|show -o json``.

Owns the shapes. NaN and infinities are strings in them, as everywhere at rest.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from sentinel.bundle.manifest import Manifest, PartHeader
from sentinel.bundle.reader import Bundle


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class BundleRecord(_Record):
    """One bundle; ``parts`` are the headers asked for, ``ranks`` all whose part is on this disk."""

    schema_version: Literal[1] = 1
    id: str
    path: str
    partial: bool
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    manifest: Manifest | None
    parts: tuple[PartHeader, ...] = ()


class BundleList(_Record):
    """The bundles of a run directory. ``refused`` says in a line each why some could not be read."""

    schema_version: Literal[1] = 1
    bundles: tuple[BundleRecord, ...]
    refused: tuple[str, ...]


def bundle_record(bundle: Bundle, parts: tuple[PartHeader, ...] = ()) -> BundleRecord:
    """The record of an open bundle. Raises BundleRefused."""
    return BundleRecord(
        id=bundle.id,
        path=str(bundle.path),
        partial=bundle.partial,
        ranks=bundle.ranks,
        missing_ranks=bundle.missing_ranks,
        manifest=bundle.manifest,
        parts=parts,
    )
