"""The page of a bundle, and its odd samples in sentences."""

from __future__ import annotations

import re
from pathlib import Path

import story

from sentinel.bundle.manifest import TensorStatistics
from sentinel.bundle.reader import Bundle
from sentinel.postmortem.bundle_page import STATISTICS_SHOWN, describe_bundle
from sentinel.postmortem.bundle_record import BundleRecord, bundle_record
from sentinel.postmortem.samples import odd_samples, sample_sentences


def test_nonfinite_statistics_come_first(tmp_path: Path) -> None:
    """Of many tensors, those with NaN or inf are shown first, and the rest is counted."""
    many = [TensorStatistics(name=f"layer.{n}.weight", dtype="float32", shape=(2, 3)) for n in range(40)]
    many[37] = many[37].model_copy(update={"inf": 2})
    part = story.header(1, gradient_statistics=tuple(many))
    page = describe_bundle(Bundle.open(story.write_part(tmp_path, part).parent))
    rows = [line.split()[0] for line in page.splitlines() if line.startswith("    layer.")]
    assert rows[0] == "layer.37.weight"
    assert len(rows) == STATISTICS_SHOWN
    assert f"… and {40 - STATISTICS_SHOWN} more" in page
    assert "1 of 40" in page


def test_healthy_ranks_are_left_out(tmp_path: Path) -> None:
    """Of many ranks only those with something odd are shown in full; if none is odd, the lowest."""
    for rank in range(6):
        part = story.write_part(tmp_path, story.header(rank, sample_findings=()))
    page = describe_bundle(Bundle.open(part.parent))
    assert re.findall(r"^Rank (\d):", page, re.MULTILINE) == ["1"]
    assert describe_bundle(Bundle.open(part.parent), ranks=[0, 5]).count("\nRank ") == 2


def test_parameters_after_the_step_are_told(tmp_path: Path) -> None:
    """The page says whether the parameters are those before or after the step."""
    part = story.write_part(tmp_path, story.header(1, state_after_step=True))
    assert "parameters as they were after the step" in describe_bundle(Bundle.open(part.parent))


def test_mutated_and_omitted_tensors_are_told(tmp_path: Path) -> None:
    """Tensors that changed after they were caught, or were left out, are named with the reason."""
    batch = story.header(1).batches[0].model_copy(update={"mutated": ("b0.image",), "omitted": ("b0.huge: byte_cap",)})
    page = describe_bundle(Bundle.open(story.write_part(tmp_path, story.header(1, batches=(batch,))).parent))
    assert "changed in place afterwards: b0.image" in page
    assert "left out: b0.huge: byte_cap" in page


def test_sentence_has_the_data_set_index() -> None:
    """A sample's sentence carries its index in the data set where the sampler showed it, and lacks it where not."""
    assert "sample 5 (data set index 235) of the DataLoader's batch" in sample_sentences(story.header(1))[0]
    batch = story.header(1).batches[0].model_copy(update={"sample_indices": None, "source": "forward"})
    (sentence,) = sample_sentences(story.header(1, batches=(batch,)))
    assert sentence == "sample 5 of the model's input, tensor image is constant (zero variance): every element is 7"


def test_only_suspects_are_asked(tmp_path: Path) -> None:
    """Odd samples are those of the suspect ranks; a bundle that cannot be read, or is not here, has none."""
    story.write_bundle(tmp_path)
    assert [line.rank for line in odd_samples(story.incident(), tmp_path)] == [1]
    assert odd_samples(story.incident(suspect_ranks=(0,)), tmp_path) == []
    assert odd_samples(story.incident(bundle="bundles/absent"), tmp_path) == []
    assert odd_samples(story.incident(), None) == []


def test_record_survives_json(tmp_path: Path) -> None:
    """The JSON of a bundle reads back to the same record, NaN included."""
    bundle = Bundle.open(story.write_bundle(tmp_path))
    record = bundle_record(bundle, tuple(part.header for part in bundle.parts.values()))
    again = BundleRecord.model_validate_json(record.model_dump_json())
    assert again.model_dump_json() == record.model_dump_json()
    assert '"loss":"NaN"' in record.model_dump_json()
