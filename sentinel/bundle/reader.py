"""Reading a bundle that may be partial, damaged or hostile: manifest, parts, and their tensors on demand.

Owns what a reader gets to see. Nothing is ever unpickled; whatever does not look as ``manifest.py`` says raises ``BundleRefused``
with one line.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

from pydantic import BaseModel, ValidationError

from sentinel.bundle.manifest import PART_FILE, Manifest, PartHeader
from sentinel.bundle.paths import (
    MANIFEST_FILE,
    BundleRefused,
    entries,
    is_bundle_id,
    is_file_name,
    kind_of,
    open_directory,
    part_directory,
    printable,
    rank_of_directory,
    read_json,
)
from sentinel.bundle.tensors import TensorFile

__all__ = ["Bundle", "BundleRefused", "Part", "TensorFile", "read_manifest"]

Model = TypeVar("Model", bound=BaseModel)


class Part:
    """One rank's part on this disk."""

    def __init__(self, rank: int, path: Path, header: PartHeader) -> None:
        self.rank = rank
        self.path = path
        self.header = header

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the part's files."""
        with open_directory(self.path) as directory:
            return tuple(entries(directory))

    def tensors(self, file: str) -> TensorFile | None:
        """Tensors of one of the part's files (``BATCHES_FILE``, …), None if the part has no such file. Raises BundleRefused."""
        if not is_file_name(file):
            raise BundleRefused(f"not a file name of a bundle: {printable(file)}")
        return TensorFile(self.path, file) if os.path.lexists(self.path / file) else None


class Bundle:
    """A bundle directory. ``manifest`` is None until the coordinator has committed it."""

    def __init__(self, path: Path, manifest: Manifest | None, ranks: tuple[int, ...]) -> None:
        self.path = path
        self.manifest = manifest
        self.ranks = ranks

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a bundle given as its directory or as its manifest. Raises BundleRefused."""
        directory = bundle_directory(Path(path))
        with open_directory(directory) as fd:
            ranks = tuple(rank for name in entries(fd) if (rank := rank_of_directory(name)) is not None)
            manifest = read_manifest(fd)
        if manifest is None and not ranks:
            raise BundleRefused(f"{directory} is not a bundle: no {MANIFEST_FILE} and no part of any rank")
        return cls(directory, manifest, ranks)

    @property
    def id(self) -> str:
        """Name of the bundle."""
        return self.manifest.id if self.manifest else self.path.name

    @property
    def partial(self) -> bool:
        """True unless the manifest says that every rank's part is here."""
        return self.manifest is None or not self.manifest.complete

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks whose part is not here; without a manifest, as far as the parts that are here know."""
        if self.manifest is not None:
            return self.manifest.missing_ranks
        world_size = max((part.header.world_size for part in self.parts.values()), default=0)
        return tuple(sorted(set(range(min(world_size, 1 << 20))) - set(self.ranks)))

    @cached_property
    def parts(self) -> dict[int, Part]:
        """Every part on this disk, by rank. Raises BundleRefused if one cannot be read."""
        return {rank: self.part(rank) for rank in self.ranks}

    def part(self, rank: int) -> Part:
        """One rank's part. Raises BundleRefused: not here, or not a part."""
        if rank not in self.ranks:
            raise BundleRefused(f"bundle {printable(self.id)} has no part of rank {rank} on this disk")
        name = part_directory(rank)
        with open_directory(self.path) as bundle, open_directory(name, bundle) as directory:
            header = _parse(PartHeader, read_json(PART_FILE, directory), f"{name}/{PART_FILE}")
        if header.rank != rank:
            raise BundleRefused(f"{name}/{PART_FILE} says it is of rank {header.rank}")
        return Part(rank, self.path / name, header)


def bundle_directory(path: Path) -> Path:
    """The bundle's directory for a path to it or to its manifest. Raises BundleRefused."""
    directory = path.parent if path.name == MANIFEST_FILE else path
    try:
        resolved = directory.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise BundleRefused(f"no bundle at {printable(str(path))}") from None
    if not resolved.is_dir():
        raise BundleRefused(f"{printable(str(path))} is neither a bundle's directory nor its {MANIFEST_FILE}")
    return resolved


def read_manifest(bundle: int) -> Manifest | None:
    """The manifest in an open bundle directory, None if there is none. Raises BundleRefused."""
    if kind_of(MANIFEST_FILE, bundle) == "absent":
        return None
    manifest = _parse(Manifest, read_json(MANIFEST_FILE, bundle), MANIFEST_FILE)
    if not is_bundle_id(manifest.id):
        raise BundleRefused(f"{MANIFEST_FILE} names itself {printable(manifest.id)}")
    return manifest


def _parse(model: type[Model], content: bytes, where: str) -> Model:
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = printable(".".join(str(p) for p in first["loc"]))
        raise BundleRefused(f"{where} is not what a bundle has there: {first['msg'][:120]} ({place})") from error
