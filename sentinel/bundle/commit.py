"""Committing a bundle: look at the parts that are on disk, hash their files, write ``manifest.json`` last.

Owns the manifest's writing. Reads parts only as far as their header; never follows a symlink and never leaves the bundle's
directory. Commit again when a late part arrives: the manifest is replaced as a whole.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sentinel.bundle.manifest import PART_FILE, FileEntry, Manifest, PartEntry, PartHeader
from sentinel.bundle.paths import (
    BUNDLES_DIRECTORY,
    MANIFEST_FILE,
    MAX_FILES_PER_PART,
    BundleRefused,
    digest,
    entries,
    is_bundle_id,
    is_file_name,
    open_directory,
    part_directory,
    printable,
    rank_of_directory,
    read_json,
)
from sentinel.bundle.seal import as_written, sealed


@dataclass(frozen=True, slots=True)
class PresentPart:
    """A part as its rank reported it; ``error`` is the rank's own word on why it could not be written."""

    rank: int
    node: int
    directory: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """What is to be committed. ``missing`` ranks were wanted and reported nothing."""

    id: str
    run_id: str
    attempt: int
    round: int
    step: int
    world_size: int
    incidents: tuple[str, ...]
    parts: tuple[PresentPart, ...]
    missing: tuple[int, ...]
    committed_at: float


@dataclass(frozen=True, slots=True)
class _Found:
    entry: PartEntry
    files: tuple[FileEntry, ...] = ()


def commit(root: Path, request: BundleRequest) -> Manifest:
    """Write the manifest of ``root``/bundles/ID and return it.

    The disk is believed before the reports: a part that is here is listed even if its report was lost, and one that is not
    here, or not whole, or of another run or round, makes the bundle partial. Raises BundleRefused (an id or directory that
    cannot be a bundle's) and OSError (the manifest cannot be written).
    """
    if not is_bundle_id(request.id):
        raise BundleRefused(f"not a bundle id: {printable(request.id)}")
    path = root / BUNDLES_DIRECTORY / request.id
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_directory(path.parent) as parent, open_directory(request.id, parent) as bundle:
        manifest = sealed(_manifest(bundle, request))
        _write_manifest(bundle, manifest)
    return manifest


def _manifest(bundle: int, request: BundleRequest) -> Manifest:
    reported = {part.rank: part for part in request.parts}
    on_disk = {rank for name in entries(bundle) if (rank := rank_of_directory(name)) is not None}
    found = [
        _look(bundle, rank, reported.get(rank), request, rank in on_disk) for rank in sorted(on_disk | set(reported))
    ]
    whole = {f.entry.rank for f in found if f.entry.complete and not f.entry.remote}
    missing = sorted((set(range(request.world_size)) | set(request.missing) | set(reported)) - whole)
    return Manifest(
        id=request.id,
        run_id=request.run_id,
        attempt=request.attempt,
        round=request.round,
        step=request.step,
        world_size=request.world_size,
        incidents=request.incidents,
        complete=not missing,
        missing_ranks=tuple(missing),
        parts=tuple(f.entry for f in found),
        files=tuple(file for f in found for file in f.files),
        committed_at=request.committed_at,
    )


def _look(bundle: int, rank: int, reported: PresentPart | None, request: BundleRequest, is_here: bool) -> _Found:
    """One rank's part as the manifest will list it."""
    name = part_directory(rank)
    node = reported.node if reported else -1
    if not is_here:
        assert reported is not None
        # Not on this host: the rank's word is all there is.
        remote = not reported.error
        return _Found(
            PartEntry(rank=rank, node=node, directory=name, complete=remote, error=reported.error, remote=remote)
        )
    try:
        with open_directory(name, bundle) as part:
            header = _header(part, rank, request)
            files = _hash_files(part, name)
    except BundleRefused as refusal:
        return _Found(PartEntry(rank=rank, node=node, directory=name, complete=False, error=str(refusal)[:300]))
    return _Found(PartEntry(rank=rank, node=header.node, directory=name, complete=True), files)


def _header(part: int, rank: int, request: BundleRequest) -> PartHeader:
    try:
        header = PartHeader.model_validate_json(read_json(PART_FILE, part))
    except ValidationError as error:
        raise BundleRefused(f"{PART_FILE} is not a part's header: {error.error_count()} errors") from error
    if (header.run_id, header.attempt, header.round, header.rank) != (
        request.run_id,
        request.attempt,
        request.round,
        rank,
    ):
        raise BundleRefused(f"{PART_FILE} belongs to another run, round or rank")
    return header


def _hash_files(part: int, directory: str) -> tuple[FileEntry, ...]:
    names = entries(part)
    if len(names) > MAX_FILES_PER_PART:
        raise BundleRefused(f"{directory} holds {len(names)} files, more than a part has")
    for name in names:
        if not is_file_name(name):
            raise BundleRefused(f"{directory} holds {printable(name)}, which is no file of a part")
    hashed = [(name, *digest(name, part)) for name in names]
    return tuple(FileEntry(path=f"{directory}/{name}", bytes=size, sha256=sha256) for name, size, sha256 in hashed)


def _write_manifest(bundle: int, manifest: Manifest) -> None:
    """Whole or not at all: a temporary file beside it, synced, then renamed over."""
    temporary = f".{MANIFEST_FILE}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=bundle)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(as_written(manifest))
            file.flush()
            os.fsync(fd)
        os.rename(temporary, MANIFEST_FILE, src_dir_fd=bundle, dst_dir_fd=bundle)
    except OSError:
        os.unlink(temporary, dir_fd=bundle)
        raise
    os.fsync(bundle)
