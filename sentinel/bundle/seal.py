"""The manifest's own digest: a byte that changed in the list of digests is found as surely as one in a file.

Owns how it is made: SHA-256 of the manifest's bytes with 64 zeros in the place of the digest itself.
"""

from __future__ import annotations

import hashlib

from sentinel.bundle.manifest import Manifest

BLANK = "0" * 64


def as_written(manifest: Manifest) -> str:
    """The text of ``manifest.json``."""
    return manifest.model_dump_json(indent=1)


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its digest in its place."""
    blank = as_written(manifest.model_copy(update={"sha256": BLANK}))
    return manifest.model_copy(update={"sha256": hashlib.sha256(blank.encode()).hexdigest()})


def is_unbroken(content: bytes, manifest: Manifest) -> bool:
    """Is ``content``, which was read as ``manifest``, byte for byte what was sealed?"""
    head, found, tail = content.rpartition(manifest.sha256.encode())
    return len(found) == len(BLANK) and hashlib.sha256(head + BLANK.encode() + tail).hexdigest() == manifest.sha256
