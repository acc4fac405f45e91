"""Is a bundle still what was committed? The manifest against the disk.

Owns the comparison and the names of what can be wrong. A bundle that says of itself that it is partial is no problem here; the
reader tells that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sentinel.bundle.manifest import FileEntry, Manifest
from sentinel.bundle.paths import (
    MANIFEST_FILE,
    BundleRefused,
    digest,
    entries,
    is_file_name,
    kind_of,
    open_directory,
    part_directory,
    printable,
    rank_of_directory,
    read_json,
)
from sentinel.bundle.reader import bundle_directory, read_manifest
from sentinel.bundle.replayed import is_replay_file
from sentinel.bundle.seal import is_unbroken


class ProblemKind(StrEnum):
    """What is wrong with a bundle."""

    NO_MANIFEST = "no_manifest"  # never committed: nothing to compare with
    MANIFEST_REFUSED = "manifest_refused"  # not a manifest
    PATH_REFUSED = "path_refused"  # the manifest names a path that no bundle has
    MISSING = "missing"
    NOT_A_FILE = "not_a_file"  # a symlink, a FIFO, a directory
    SIZE = "size"
    SHA256 = "sha256"
    EXTRA = "extra"  # on disk, not in the manifest


@dataclass(frozen=True, slots=True)
class Problem:
    """One difference. ``path`` is relative to the bundle."""

    path: str
    kind: ProblemKind
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


BROKEN_SEAL = Problem(MANIFEST_FILE, ProblemKind.SHA256, "not what was committed: its own digest does not fit")


def verify(path: Path | str) -> list[Problem]:
    """Every difference between a bundle (its directory or manifest) and its manifest; empty if there is none.

    Raises BundleRefused only if there is no bundle at ``path``.
    """
    directory = bundle_directory(Path(path))
    with open_directory(directory) as bundle:
        try:
            manifest = read_manifest(bundle)
        except BundleRefused as refusal:
            return [Problem(MANIFEST_FILE, ProblemKind.MANIFEST_REFUSED, str(refusal))]
        if manifest is None:
            return [Problem(MANIFEST_FILE, ProblemKind.NO_MANIFEST, "there is none: the bundle was never committed")]
        seal = [] if is_unbroken(read_json(MANIFEST_FILE, bundle), manifest) else [BROKEN_SEAL]
        listed = [problem for entry in manifest.files for problem in _compare(bundle, entry)]
        return [*seal, *listed, *_extra(bundle, manifest)]


def _compare(bundle: int, entry: FileEntry) -> list[Problem]:
    directory, slash, name = entry.path.partition("/")
    if not slash or rank_of_directory(directory) is None or not is_file_name(name):
        return [Problem(printable(entry.path), ProblemKind.PATH_REFUSED, "not a path of a bundle")]
    if kind_of(directory, bundle) != "directory":
        return [Problem(entry.path, ProblemKind.MISSING, f"{directory} is not here")]
    try:
        with open_directory(directory, bundle) as part:
            return _compare_file(part, name, entry)
    except BundleRefused as refusal:
        return [Problem(entry.path, ProblemKind.NOT_A_FILE, str(refusal))]


def _compare_file(part: int, name: str, entry: FileEntry) -> list[Problem]:
    kind = kind_of(name, part)
    if kind == "absent":
        return [Problem(entry.path, ProblemKind.MISSING, "the file is not here")]
    if kind != "file":
        return [Problem(entry.path, ProblemKind.NOT_A_FILE, f"it is a {kind}")]
    size, sha256 = digest(name, part)
    if size != entry.bytes:
        return [Problem(entry.path, ProblemKind.SIZE, f"{size} bytes, committed with {entry.bytes}")]
    if sha256 != entry.sha256:
        return [Problem(entry.path, ProblemKind.SHA256, f"sha256 {sha256[:16]}…, committed with {entry.sha256[:16]}…")]
    return []


def _extra(bundle: int, manifest: Manifest) -> list[Problem]:
    known = {entry.path for entry in manifest.files}
    committed_parts = {part_directory(part.rank) for part in manifest.parts if part.complete and not part.remote}
    problems = []
    for name in entries(bundle):
        if name == MANIFEST_FILE or name.startswith(".") or is_replay_file(name):  # a dot marks a write in progress
            continue
        if kind_of(name, bundle) != "directory" or name not in committed_parts:
            problems.append(Problem(printable(name), ProblemKind.EXTRA, "not in the manifest"))
            continue
        problems += _extra_files(bundle, name, known)
    return problems


def _extra_files(bundle: int, directory: str, known: set[str]) -> list[Problem]:
    with open_directory(directory, bundle) as part:
        paths = [f"{directory}/{name}" for name in entries(part)]
    return [Problem(printable(p), ProblemKind.EXTRA, "not in the manifest") for p in paths if p not in known]
