"""Two parts compared: another rank of the same round, or the same rank of another bundle. What is equal, what differs, by how much.

Owns the comparison and its two renderings. Tensors are compared bit by bit first; only what differs is looked at in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from sentinel.bundle.manifest import (
    BATCHES_FILE,
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    PARAMETERS_FILE,
    RNG_FILE,
    PartHeader,
)
from sentinel.bundle.reader import BundleRefused, Part
from sentinel.bundle.tensors import TensorFile
from sentinel.postmortem.text import columns, number, printable

FILES = (PARAMETERS_FILE, OPTIMIZER_FILE, GRADIENTS_FILE, BATCHES_FILE, RNG_FILE)
ROWS_SHOWN = 24
MAX_BYTES = 512 << 20

Relation = Literal["equal", "different", "only_a", "only_b", "other_shape", "unreadable"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class TensorDifference(_Record):
    """One tensor in both parts. ``elements`` differ in any bit; ``largest`` is the largest finite difference."""

    file: str
    name: str
    relation: Relation
    elements: int = 0
    of: int = 0
    largest: float | None = None
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    detail: str = ""


class FieldDifference(_Record):
    """A fact of the header, or of the environment, that is not the same."""

    name: str
    a: str
    b: str


class PartDifference(_Record):
    """Two parts compared. ``tensors`` holds all of them, the equal ones too."""

    a: str
    b: str
    fields: tuple[FieldDifference, ...]
    tensors: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        """True if every tensor is in both and bitwise equal."""
        return all(tensor.relation == "equal" for tensor in self.tensors)


class Comparison(_Record):
    """What ``sentinel dump diff -o json`` prints."""

    schema_version: Literal[1] = 1
    parts: tuple[PartDifference, ...]


def compare(a: Part, b: Part, names: tuple[str, str]) -> PartDifference:
    """Compare two parts, called ``names`` in what is printed. Raises BundleRefused."""
    tensors = [one for file in FILES for one in _files(file, a.tensors(file), b.tensors(file))]
    tensors = [_left_out(one, a if one.relation == "only_b" else b) for one in tensors]
    return PartDifference(a=names[0], b=names[1], fields=tuple(_fields(a.header, b.header)), tensors=tuple(tensors))


def describe_difference(found: PartDifference) -> str:
    """The comparison as text: facts that differ, a line per file, and the tensors that differ most."""
    blocks = [f"A  {printable(found.a, 400)}\nB  {printable(found.b, 400)}"]
    if found.fields:
        blocks.append(columns(("FACT", "A", "B"), ((f.name, f.a, f.b) for f in found.fields)))
    blocks.append(columns(("FILE", "TENSORS", "EQUAL", "DIFFERENT", "ONLY A", "ONLY B"), _files_table(found.tensors)))
    unequal = [t for t in found.tensors if t.relation != "equal"]
    if unequal:
        rows = (_row(t) for t in _worst_first(unequal)[:ROWS_SHOWN])
        table = columns(("TENSOR", "FILE", "WHAT", "ELEMENTS", "LARGEST", "NONFINITE A", "NONFINITE B"), rows)
        rest = len(unequal) - ROWS_SHOWN
        blocks.append(f"{table}\n… and {rest} more (all of them: -o json)" if rest > 0 else table)
    else:
        blocks.append("Every tensor is in both, bit for bit." if found.tensors else "Neither part holds tensors.")
    return "\n\n".join(blocks)


def _fields(a: PartHeader, b: PartHeader) -> Iterator[FieldDifference]:
    for name in ("run_id", "attempt", "rank", "world_size", "round", "step", "loss", "loss_scale", "state_after_step"):
        yield from _field(name, getattr(a, name), getattr(b, name))
    for name in ("argv", "cwd", "python", "torch", "host", "git_commit"):
        yield from _field(name, getattr(a.environment, name), getattr(b.environment, name))
    ours, theirs = a.environment.variables, b.environment.variables
    for name in sorted({*ours, *theirs}):
        yield from _field(f"${name}", ours.get(name), theirs.get(name))


def _field(name: str, a: Any, b: Any) -> Iterator[FieldDifference]:
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    if a != b and not both_nan:
        yield FieldDifference(name=name, a=_shown(a), b=_shown(b))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return printable(" ".join(str(part) for part in value), 80)
    return "-" if value is None else printable(str(value), 80)


def _files(file: str, a: TensorFile | None, b: TensorFile | None) -> Iterator[TensorDifference]:
    ours, theirs = set(a.names if a else ()), set(b.names if b else ())
    for name in sorted(ours | theirs):
        if a is not None and b is not None and name in ours and name in theirs:
            yield _tensor(file, name, a, b)
        else:
            yield TensorDifference(file=file, name=name, relation="only_a" if name in ours else "only_b")


def _left_out(one: TensorDifference, lacking: Part) -> TensorDifference:
    """A parameter that is in one part only, because the other leaves it to other ranks, says so."""
    copies = lacking.header.copies
    if one.relation not in ("only_a", "only_b") or one.file != PARAMETERS_FILE or copies is None:
        return one
    if one.name not in copies.names:
        return one
    ranks = ", ".join(str(rank) for rank in copies.ranks)
    return one.model_copy(update={"detail": f"left to the parts of ranks {ranks}"})


def _tensor(file: str, name: str, a: TensorFile, b: TensorFile) -> TensorDifference:
    one, other = a.entry(name), b.entry(name)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        detail = f"{one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
        return TensorDifference(file=file, name=name, relation="other_shape", detail=detail)
    of = math.prod(one.shape)
    if one.bytes > MAX_BYTES:
        detail = f"{one.bytes >> 20} MiB, too large to compare"
        return TensorDifference(file=file, name=name, relation="unreadable", of=of, detail=detail)
    raw = a.raw(name), b.raw(name)
    if raw[0] == raw[1]:
        return TensorDifference(file=file, name=name, relation="equal", of=of)
    bits = [np.frombuffer(content, np.uint8).reshape(max(of, 1), -1) for content in raw]
    elements = int((bits[0] != bits[1]).any(axis=1).sum())
    numbers = {} if file == RNG_FILE else _in_numbers(a, b, name)  # a generator's state is no quantity
    return TensorDifference(file=file, name=name, relation="different", elements=elements, of=of, **numbers)


def _in_numbers(a: TensorFile, b: TensorFile, name: str) -> dict[str, Any]:
    """Largest finite difference and counts of what is not finite; nothing for dtypes that have no numbers here."""
    try:
        one, other = (_real(file.array(name)) for file in (a, b))
    except BundleRefused as refusal:
        return {"detail": str(refusal)}
    finite = np.isfinite(one) & np.isfinite(other)
    with np.errstate(over="ignore"):
        largest = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
    return {
        "largest": largest,
        "nonfinite_a": int((~np.isfinite(one)).sum()),
        "nonfinite_b": int((~np.isfinite(other)).sum()),
    }


def _real(values: NDArray[Any]) -> NDArray[np.float64]:
    flat = values.ravel()
    return (
        np.concatenate([flat.real, flat.imag]).astype(np.float64) if np.iscomplexobj(flat) else flat.astype(np.float64)
    )


def _files_table(tensors: Sequence[TensorDifference]) -> Iterator[tuple[str, ...]]:
    for file in FILES:
        own = [t for t in tensors if t.file == file]
        if own:
            count = {
                relation: sum(1 for t in own if t.relation == relation) for relation in ("equal", "only_a", "only_b")
            }
            different = len(own) - sum(count.values())
            yield (
                file,
                str(len(own)),
                *(str(n) for n in (count["equal"], different, count["only_a"], count["only_b"])),
            )


def _worst_first(tensors: list[TensorDifference]) -> list[TensorDifference]:
    """What only one part has comes last; before it the nonfinite, then the largest differences."""
    return sorted(
        tensors,
        key=lambda t: (
            t.relation in ("only_a", "only_b"),
            t.file == RNG_FILE,
            -(t.nonfinite_a != t.nonfinite_b),
            -(t.largest or 0.0),
            t.name,
        ),
    )


def _row(t: TensorDifference) -> tuple[str, ...]:
    what = t.detail or t.relation.replace("_", " ")
    elements = f"{t.elements} of {t.of}" if t.relation == "different" else "-"
    nonfinite = (str(t.nonfinite_a), str(t.nonfinite_b)) if t.relation == "different" else ("-", "-")
    return (t.name, t.file.partition(".")[0], what, elements, number(t.largest), *nonfinite)
