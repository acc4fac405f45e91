"""What pages tell of bundles: whole, partial, elsewhere, damaged, and the odd samples of the suspects."""

from __future__ import annotations

from pathlib import Path

from story import BUNDLE, incident, write_bundle

from sentinel.coordinator.kept_bundles import kept_bundles


def test_a_whole_bundle_is_told_with_its_odd_samples(tmp_path: Path) -> None:
    """Size, completeness, and the flat image of the suspect; each bundle once, however many incidents name it."""
    write_bundle(tmp_path)
    [kept] = kept_bundles(lambda _: tmp_path, [incident(), incident(id="second")])
    assert kept.manifest is not None
    assert kept.manifest.complete
    assert kept.bytes > 0
    assert [(odd.rank, odd.finding.sample, odd.finding.what) for odd in kept.odd] == [(1, 5, "constant")]


def test_a_bundle_is_looked_for_where_it_lies(tmp_path: Path) -> None:
    """The root is asked by the bundle's id: parts may lie in a launcher's own directory."""
    write_bundle(tmp_path / "launcher")
    asked: list[str] = []

    def root(bundle: str) -> Path:
        asked.append(bundle)
        return tmp_path / "launcher"

    [kept] = kept_bundles(root, [incident()])
    assert kept.manifest is not None
    assert asked == [BUNDLE]


def test_a_bundle_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """Elsewhere, or damaged: one line instead of a size, and no fault."""
    [kept] = kept_bundles(lambda _: tmp_path, [incident()])
    assert (kept.manifest, kept.problem) == (None, "not on this host, or not committed yet")
    bundle = write_bundle(tmp_path)
    (bundle / "manifest.json").write_text("{")
    [kept] = kept_bundles(lambda _: tmp_path, [incident()])
    assert kept.manifest is None
    assert "manifest.json" in kept.problem


def test_no_bundle_is_no_line(tmp_path: Path) -> None:
    """An incident that kept nothing adds nothing."""
    assert kept_bundles(lambda _: tmp_path, [incident(bundle=None)]) == []
