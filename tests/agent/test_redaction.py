"""The user's own function decides what of a batch is written; whatever it does, the training computes with what it had."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from parts import header_of, request
from safetensors.torch import load_file

from sentinel.bundle.manifest import BATCHES_FILE, PartHeader
from sentinel_agent.dump import write_part
from sentinel_agent.errors import Health
from sentinel_agent.redaction import Redaction
from sentinel_agent.window import Window

BATCH = {
    "image": torch.arange(6.0),
    "label": torch.tensor([1, 0]),
    "mask": np.ones(3),
    "caption": ["a name", "b"],
    "scan": b"raw",
}


@pytest.fixture
def written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[PartHeader, dict[str, Any], Health]]:
    """Write a part of BATCH under a redaction function: its header, its batch file, and the agent's health after it."""

    def write(function: Callable[[str, Any], Any]) -> tuple[PartHeader, dict[str, Any], Health]:
        module = ModuleType("private_things")
        module.redact = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "private_things", module)
        window, health = Window(), Health(0, lambda _reason: None)
        window.loader_batch(BATCH, [7, 8])
        redaction = Redaction("private_things:redact", health)
        result = write_part(request(tmp_path, entries=window.entries(0), redaction=redaction))
        file = Path(result.directory) / BATCHES_FILE
        return header_of(result), load_file(file) if file.exists() else {}, health

    return write


def test_what_it_returns_is_written(written) -> None:
    """Tensors are replaced, left out or kept, strings too; statistics are of what the training saw."""

    def redact(name: str, value: Any) -> Any:
        if name == "b0.image":
            return torch.zeros(2)
        if name == "b0.caption.0":
            return "[name]"
        return None if name in ("b0.mask", "b0.caption.1", "b0.scan") else value

    header, tensors, health = written(redact)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"b0.image": [0.0, 0.0], "b0.label": [1, 0]}
    assert header.batches[0].structure == {
        "image": {"tensor": "b0.image"},
        "label": {"tensor": "b0.label"},
        "mask": {"omitted": "redacted", "type": "torch.float32"},
        "caption": ["[name]", {"omitted": "redacted", "type": "str"}],
        "scan": {"omitted": "redacted", "type": "bytes"},
    }
    assert "b0.mask: redacted" in header.batches[0].omitted
    assert {s.name: s.maximum for s in header.batch_statistics}["b0.image"] == 5.0
    assert health.faults == {}


def test_it_cannot_change_the_training(written) -> None:
    """It is given copies: writing into them changes neither the batch nor what the window holds of it."""

    def redact(name: str, value: Any) -> Any:
        return value.zero_() if isinstance(value, torch.Tensor) else value

    _, tensors, _ = written(redact)
    assert tensors["b0.image"].tolist() == [0.0] * 6
    assert BATCH["image"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("answer", [ValueError("planted"), 7], ids=["raises", "nonsense"])
def test_if_it_fails_nothing_is_written(written, answer: Any) -> None:
    """A function that raises, or returns neither a tensor nor None, is not asked again; no value of the batch reaches the disk."""
    asked: list[str] = []

    def redact(name: str, value: Any) -> Any:
        asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    header, tensors, health = written(redact)
    assert tensors == {}
    assert "a name" not in header.model_dump_json()
    assert b"raw".hex() not in header.model_dump_json()
    assert len(asked) == 1
    assert health.faults.total() == 1


def test_a_function_that_is_not_there_fails_like_one_that_raises() -> None:
    """A misspelt module or name leaves everything out and is counted."""
    health = Health(0, lambda _reason: None)
    redaction = Redaction("no_such_module:redact", health)
    assert redaction.tensor("b0", torch.ones(2)) is None
    assert health.faults == {"redaction:ModuleNotFoundError": 1}
