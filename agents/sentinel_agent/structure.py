"""The JSON form of a captured micro-batch: what ``BatchEntry.structure`` holds.

Owns how nesting, scalars and left-out leaves are spelled. Lists, plain dicts with string keys, numbers, strings, booleans
and None are themselves; everything else is an object with one of the ``TAGS`` as its first key:

    {"tensor": name}  {"array": name}  {"sparse": name, "layout": …, "shape": …}  {"omitted": reason, "type": …}
    {"tuple": […]}  {"dict": [[key, value], …]}
    {"namedtuple" | "dataclass" | "mapping" | "object": type, "items": [[key, value], …]}
    {"float": "nan"}  {"complex": [real, imag]}  {"bytes": hex}  {"text": start, "length": n}  {"dtype": …}  {"device": …}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from sentinel_agent.capture import Branch, Held, Omitted

# fmt: off
TAGS: Final = frozenset({
    "tensor", "array", "sparse", "omitted", "tuple", "dict", "namedtuple", "dataclass", "mapping", "object",
    "float", "complex", "bytes", "text", "dtype", "device",
})
# fmt: on
MAX_TEXT: Final = 1 << 14  # characters of one string
MAX_BYTES: Final = 1 << 10


def describe(node: Any, names: Mapping[Held, str], missing: Mapping[Held, str]) -> Any:
    """The JSON form of a captured tree. ``names`` are the tensors that were stored, ``missing`` why others were not."""
    if isinstance(node, Held):
        return _held(node, names, missing)
    if isinstance(node, Omitted):
        return {"omitted": str(node.reason), "type": node.type_name}
    if isinstance(node, Branch):
        return _branch(node, [describe(child, names, missing) for child in node.children])
    return _scalar(node)


def _held(held: Held, names: Mapping[Held, str], missing: Mapping[Held, str]) -> dict[str, Any]:
    name = names.get(held)
    if name is None:
        return {"omitted": missing.get(held, "not_stored"), "type": str(held.tensor.dtype)}
    if held.array is not None:
        return {"array": name}
    if held.tensor.layout is not torch.strided:
        return {"sparse": name, "layout": str(held.tensor.layout), "shape": list(held.tensor.shape)}
    if held.tensor.device.type != "cpu":
        return {"tensor": name, "device": str(held.tensor.device)}
    return {"tensor": name}


def _branch(branch: Branch, children: list[Any]) -> Any:
    if branch.keys is None:
        return children if branch.kind == "list" else {"tuple": children}
    pairs = [[_scalar(key), child] for key, child in zip(branch.keys, children, strict=True)]
    if branch.kind != "dict":
        return {branch.kind: branch.type_name, "items": pairs}
    if all(isinstance(key, str) for key in branch.keys) and not TAGS.intersection(branch.keys):
        return dict(pairs)
    return {"dict": pairs}


def _scalar(value: Any) -> Any:
    if isinstance(value, str):
        clean = value[:MAX_TEXT].encode("utf-8", "replace").decode()
        return clean if len(value) <= MAX_TEXT else {"text": clean, "length": len(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_scalar(value.real), _scalar(value.imag)]}
    if isinstance(value, bytes):
        return {"bytes": value[:MAX_BYTES].hex(), "length": len(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return value
