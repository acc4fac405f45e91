"""Takes a micro-batch as the user nested it: tensors held, plain values copied, everything else named and left out.

Owns which types are captured, when a tensor is cloned and when it is only referred to. Runs in the training thread, so it
never synchronises an accelerator, never runs code of the user's classes, and is bounded in depth and in leaves. What is kept
for how long is in ``window.py``; how it is written is in ``dump.py``.
"""

from __future__ import annotations

import weakref
from collections import Counter, UserDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from sentinel_agent.contents import local, sparse_parts

MAX_DEPTH: Final = 8
MAX_LEAVES: Final = 1024
MAX_PLAIN: Final = 1 << 16  # scalars of one plain list, such as token ids that were never made a tensor
PROBES: Final = 64  # elements of a large numpy array that are compared to notice a change; arrays have no version

_PLAIN: Final = frozenset({int, bool, str, type(None)})
_SCALARS: Final = frozenset({int, bool, str, type(None), float, complex, bytes, torch.dtype, torch.device})


class Drop(StrEnum):
    """Why something is not in the window; the keys of ``Window.drops``."""

    BYTE_CAP = "byte_cap"  # the ring was full: the oldest tensors gave way
    UNSUPPORTED_TYPE = "unsupported_type"  # a type that is neither a container nor a tensor we can read
    TOO_DEEP = "too_deep"
    TOO_MANY_LEAVES = "too_many_leaves"
    NO_STORAGE = "no_storage"  # meta tensors and tensors of a function transform: nothing to read later
    UNUSED_BATCH = "unused_batch"  # a loader ran on and on with no forward
    REDACTED = "redacted"  # the user's own function left it out
    EVALUATION_BATCH = "evaluation_batch"  # used by a forward without gradients only


@dataclass(slots=True, eq=False)
class Held:
    """One tensor of the window: a clone, or a reference with the version it had when it was caught.

    ``holders`` counts the entries that hold it, so that bytes of a batch that is also the forward's input count once.
    """

    tensor: Tensor
    version: int | None  # None: a clone, or nothing tells whether it changed
    nbytes: int
    origin: weakref.ref[Any] | None = None
    origin_id: int = 0
    origin_version: int = 0
    array: numpy.ndarray[Any, Any] | None = None
    probe: bytes = b""
    holders: int = 0

    def changed(self) -> bool:
        """True if the contents were written to in place since they were caught."""
        if self.probe and self.array is not None:
            return probe(self.array) != self.probe
        return self.version is not None and self.tensor._version != self.version

    def is_of(self, value: object) -> bool:
        """True if this is what ``value``, unchanged, was caught as."""
        if self.origin is None or self.origin() is not value:
            return False
        return not isinstance(value, Tensor) or value.is_inference() or value._version == self.origin_version


@dataclass(frozen=True, slots=True)
class Omitted:
    """A leaf that was left out: why, and what it was."""

    reason: Drop
    type_name: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A container: ``kind`` is list, tuple, dict, namedtuple, dataclass, mapping or object; ``keys`` is None for sequences.

    ``type_name`` is ``module:qualname`` where the kind alone does not say how to build it again.
    """

    kind: str
    children: tuple[Any, ...]
    keys: tuple[Any, ...] | None = None
    type_name: str = ""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured value: ``tree`` of Branch, Held, Omitted and scalars; ``held`` lists its tensors once each, in order."""

    tree: Any
    held: tuple[Held, ...]


def capture(value: object, clone_below: int, known: Mapping[int, Held], drops: Counter[str]) -> Captured:
    """Capture ``value``. Tensors up to ``clone_below`` bytes are cloned unless they live on an accelerator.

    ``known`` maps ``id`` of a tensor to what it was caught as before: the same tensor, unchanged, is held once.
    """
    walk = _Walk(clone_below, known, drops)
    tree = walk.node(value, 0)
    return Captured(tree, tuple(walk.held.values()))


def released(captured: Captured, reason: Drop) -> Captured:
    """The same structure with every tensor left out: what remains of a batch the ring had no room for."""
    return Captured(_released(captured.tree, reason), ())


def _released(node: object, reason: Drop) -> object:
    if isinstance(node, Held):
        return Omitted(reason, f"{node.tensor.dtype} {tuple(node.tensor.shape)}")
    if isinstance(node, Branch):
        return Branch(node.kind, tuple(_released(c, reason) for c in node.children), node.keys, node.type_name)
    return node


def probe(array: numpy.ndarray[Any, Any]) -> bytes:
    """Bytes of a few elements spread over ``array``."""
    step = max(1, array.size // PROBES)
    return bytes(array.flat[::step].tobytes())


class _Walk:
    """One pass over one value."""

    __slots__ = ("clone_below", "drops", "held", "known", "left")

    def __init__(self, clone_below: int, known: Mapping[int, Held], drops: Counter[str]) -> None:
        self.clone_below = clone_below
        self.known = known
        self.drops = drops
        self.left = MAX_LEAVES
        self.held: dict[int, Held] = {}  # by id of the user's object

    def node(self, value: Any, depth: int) -> object:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if issubclass(kind, Tensor):
            return self.hold(value)
        if issubclass(kind, numpy.ndarray):
            return self.hold_array(value)
        if depth >= MAX_DEPTH:
            return self.omit(Drop.TOO_DEEP, value)
        if issubclass(kind, (list, tuple)):
            return self.sequence(value, kind, depth)
        if issubclass(kind, dict):
            name = "" if kind is dict else _type_name(kind)
            return self.items("dict" if kind is dict else "mapping", dict.items(value), name, depth)
        if issubclass(kind, UserDict):
            return self.items("mapping", dict.items(value.data), _type_name(kind), depth)
        return self.other(value, kind, depth)

    def sequence(self, value: list[Any] | tuple[Any, ...], kind: type, depth: int) -> object:
        names = getattr(kind, "_fields", None)
        if names is not None and issubclass(kind, tuple):
            return self.items("namedtuple", zip(names, value, strict=False), _type_name(kind), depth)
        name = "tuple" if issubclass(kind, tuple) else "list"
        if len(value) > 16 and _PLAIN.issuperset(map(type, value)):
            return Branch(name, tuple(value)) if len(value) <= MAX_PLAIN else self.omit(Drop.TOO_MANY_LEAVES, value)
        if not self.room(len(value)):
            return self.omit(Drop.TOO_MANY_LEAVES, value)
        return Branch(name, tuple([self.node(child, depth + 1) for child in value]))

    def items(self, kind: str, items: Iterable[tuple[Any, Any]], type_name: str, depth: int) -> object:
        pairs = list(items)
        if not self.room(len(pairs)):
            return self.omit(Drop.TOO_MANY_LEAVES, pairs)
        keys = tuple([key if type(key) in _PLAIN else str(type(key)) for key, _ in pairs])
        return Branch(kind, tuple([self.node(child, depth + 1) for _, child in pairs]), keys, type_name)

    def other(self, value: Any, kind: type, depth: int) -> object:
        """Dataclasses, numpy scalars, and objects that carry tensors as plain attributes (a collate function's batch class)."""
        if issubclass(kind, numpy.generic):
            return self.node(value.item(), depth) if value.dtype.kind in "biufc" else self.omit_type(value)
        fields = getattr(kind, "__dataclass_fields__", None)
        if fields is not None:
            pairs = [(name, getattr(value, name, None)) for name in fields]
            return self.items("dataclass", pairs, _type_name(kind), depth)
        attributes = getattr(value, "__dict__", None) if kind.__module__ not in ("builtins", "torch") else None
        if type(attributes) is dict:
            tensors = [(n, v) for n, v in attributes.items() if isinstance(v, (Tensor, numpy.ndarray))]
            if tensors and not isinstance(value, type):
                return self.items("object", tensors, _type_name(kind), depth)
        return self.omit_type(value)

    def hold(self, tensor: Tensor) -> Held | Omitted:
        key = id(tensor)
        known = self.held.get(key) or self.known.get(key)
        if known is not None and known.is_of(tensor):
            self.held[key] = known
            return known
        plain = _readable(tensor)
        if isinstance(plain, Drop):
            return self.omit(plain, tensor)
        held = self.held[key] = _held(plain, self.clone_below)
        held.origin = weakref.ref(tensor)
        held.origin_id = key
        held.origin_version = 0 if tensor.is_inference() else tensor._version
        return held

    def hold_array(self, array: numpy.ndarray[Any, Any]) -> Held | Omitted:
        known = self.held.get(id(array))
        if known is not None:
            return known
        if array.dtype.kind not in "biufc" or not array.dtype.isnative or array.dtype.itemsize > 16:
            return self.omit_type(array)
        small = array.nbytes <= self.clone_below
        kept = array.copy() if small else array
        empty = torch.empty(0)
        held = Held(empty, None, array.nbytes, array=kept, probe=b"" if small else probe(array))
        self.held[id(array)] = held
        return held

    def room(self, leaves: int) -> bool:
        self.left -= leaves
        return self.left >= 0

    def omit(self, reason: Drop, value: object) -> Omitted:
        self.drops[reason] += 1
        return Omitted(reason, _type_name(type(value)))

    def omit_type(self, value: object) -> Omitted:
        return self.omit(Drop.UNSUPPORTED_TYPE, value)


def _held(tensor: Tensor, clone_below: int) -> Held:
    nbytes = _nbytes(tensor)
    if nbytes <= clone_below and tensor.device.type == "cpu":
        return Held(tensor.detach().clone(), None, nbytes)
    # detach() shares contents and version counter but not the graph, which must not live as long as the window.
    detached = tensor.detach()
    return Held(detached, None if detached.is_inference() else detached._version, nbytes)


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.nbytes for part in sparse_parts(tensor).values())


def _readable(tensor: Tensor) -> Tensor | Drop:
    """A tensor whose bytes can be read later, or why there is none."""
    if type(tensor) is not Tensor:
        tensor = local(tensor)
        if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return Drop.UNSUPPORTED_TYPE
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.as_subclass(Tensor)
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return Drop.NO_STORAGE
    if tensor.is_nested or tensor.is_quantized or tensor.device.type == "mkldnn":
        return Drop.UNSUPPORTED_TYPE
    if tensor.layout is not torch.strided and not sparse_parts(tensor):
        return Drop.UNSUPPORTED_TYPE
    return tensor


def _type_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def walk_tensors(node: object, path: str = "") -> Iterator[tuple[str, Held]]:
    """Every held tensor of a tree with its dotted path, in the user's order."""
    if isinstance(node, Held):
        yield path, node
    elif isinstance(node, Branch):
        keys: Iterable[object] = range(len(node.children)) if node.keys is None else node.keys
        for key, child in zip(keys, node.children, strict=True):
            yield from walk_tensors(child, f"{path}.{key}" if path else str(key))
