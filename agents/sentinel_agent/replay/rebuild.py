"""Builds a recorded micro-batch again, as the user had nested it.

Owns the inverse of ``structure.py``. Classes are only looked up among modules that the script has imported by itself: a bundle
names them, and a name in a bundle must not be able to import anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sentinel_agent.structure import TAGS


class NotRebuildable(ValueError):
    """A batch holds something that was not recorded; the text names it in a few words."""


def rebuild(structure: Any, tensors: Mapping[str, Tensor], live: Any = None) -> Any:
    """The value behind ``structure``. ``live`` is what the script made by itself: it fills what was not recorded.

    Raises NotRebuildable where something was left out and ``live`` has nothing in its place.
    """
    if isinstance(structure, list):
        return [rebuild(child, tensors, _item(live, i)) for i, child in enumerate(structure)]
    if not isinstance(structure, dict):
        return structure
    tag = next(iter(structure), None)
    if tag not in TAGS:
        return {key: rebuild(child, tensors, _item(live, key)) for key, child in structure.items()}
    return _BUILDERS[tag](structure, tensors, live)


def _tensor(structure: dict[str, Any], tensors: Mapping[str, Tensor], live: Any) -> Any:
    found = tensors.get(structure["tensor"])
    if found is None:
        return _missing("tensor", live)
    found = found.clone()
    if isinstance(live, Tensor) and live.is_floating_point() and found.is_floating_point():
        found = found.to(live.dtype)  # another precision is being tried
    return found.to(live.device) if isinstance(live, Tensor) else found


def _array(structure: dict[str, Any], tensors: Mapping[str, Tensor], live: Any) -> Any:
    found = tensors.get(structure["array"])
    return _missing("array", live) if found is None else found.clone().numpy()


def _sparse(structure: dict[str, Any], tensors: Mapping[str, Tensor], live: Any) -> Any:
    name = structure["sparse"]
    if "coo" not in structure["layout"]:
        return _missing(f"{structure['layout']} tensor", live)
    return torch.sparse_coo_tensor(tensors[f"{name}.indices"], tensors[f"{name}.values"], structure["shape"])


def _omitted(structure: dict[str, Any], _: Mapping[str, Tensor], live: Any) -> Any:
    return _missing(f"{structure.get('type', 'value')} ({structure['omitted']})", live)


def _tuple(structure: dict[str, Any], tensors: Mapping[str, Tensor], live: Any) -> tuple[Any, ...]:
    return tuple(rebuild(child, tensors, _item(live, i)) for i, child in enumerate(structure["tuple"]))


def _dict(structure: dict[str, Any], tensors: Mapping[str, Tensor], live: Any) -> dict[Any, Any]:
    return {key: rebuild(child, tensors, _item(live, key)) for key, child in structure["dict"]}


def _typed(structure: dict[str, Any], tensors: Mapping[str, Tensor], live: Any) -> Any:
    """A named tuple, a dataclass, a mapping or an object with attributes."""
    kind = next(iter(structure))
    name = structure[kind]
    made = type(live) if live is not None else _class(name)
    if made is None:
        raise NotRebuildable(f"{kind} {name}")
    pick = _item if kind == "mapping" else _attribute
    items = {key: rebuild(child, tensors, pick(live, key)) for key, child in structure["items"]}
    if kind == "mapping":
        return made(items)
    if kind == "namedtuple":
        return made(**items)
    built: Any = object.__new__(made)
    built.__dict__.update(vars(live) if live is not None else {})
    for key, value in items.items():
        object.__setattr__(built, key, value)
    return built


def _text(structure: dict[str, Any], _: Mapping[str, Tensor], live: Any) -> Any:
    return live if isinstance(live, str) and live.startswith(structure["text"]) else structure["text"]


def _number(value: Any) -> float:
    return float(value["float"]) if isinstance(value, dict) else float(value)


_BUILDERS: dict[str, Callable[[dict[str, Any], Mapping[str, Tensor], Any], Any]] = {
    "tensor": _tensor,
    "array": _array,
    "sparse": _sparse,
    "omitted": _omitted,
    "tuple": _tuple,
    "dict": _dict,
    "namedtuple": _typed,
    "dataclass": _typed,
    "mapping": _typed,
    "object": _typed,
    "float": lambda s, _t, _l: float(s["float"]),
    "complex": lambda s, _t, _l: complex(_number(s["complex"][0]), _number(s["complex"][1])),
    "bytes": lambda s, _t, _l: bytes.fromhex(s["bytes"]),
    "text": _text,
    "dtype": lambda s, _t, _l: getattr(torch, s["dtype"].removeprefix("torch.")),
    "device": lambda s, _t, _l: torch.device(s["device"]),
}


def _missing(what: str, live: Any) -> Any:
    if live is None:
        raise NotRebuildable(what)
    return live


def _class(name: str) -> type | None:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _item(live: Any, key: Any) -> Any:
    try:
        return live[key]
    except (TypeError, KeyError, IndexError):
        return None


def _attribute(live: Any, key: str) -> Any:
    return getattr(live, key, None)
