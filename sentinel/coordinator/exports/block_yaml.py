"""Mappings, lists and strings as block YAML that people can read and review.

Owns the layout only, for what this package writes: no anchors, no comments, no other types. Needs no YAML library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/](?:[A-Za-z0-9_./:-]*[A-Za-z0-9])?")
_WORDS_WITH_MEANING = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def to_yaml(value: Any) -> str:
    """``value`` as a YAML document."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [line for key, inner in value.items() for line in _entry(f"{_scalar(key)}:", inner)]
    assert isinstance(value, Sequence)
    return [line for inner in value for line in _item(inner)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping | list | tuple):
        return (
            [key, *(f"  {line}" for line in _lines(value))]
            if value
            else [f"{key} {'{}' if isinstance(value, Mapping) else '[]'}"]
        )
    if isinstance(value, str) and "\n" in value:
        return [f"{key} |-", *(f"  {line}".rstrip() for line in value.split("\n"))]
    return [f"{key} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    if not isinstance(value, Mapping | list | tuple):
        return [f"- {_scalar(value)}"]
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_WITH_MEANING:
        return value
    return json.dumps(value, ensure_ascii=False)  # every JSON scalar is one of YAML
