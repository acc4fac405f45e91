"""What is said and answered when somebody acts on a coordinator: acknowledging an incident, asking for a dump.

Owns these two shapes, for the pages and the command line alike.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Acknowledgement(_Record):
    """What is posted to ``/api/v1/incidents/{id}/ack``."""

    by: Annotated[str, Field(min_length=1, max_length=64)]
    note: Annotated[str, Field(max_length=1000)] = ""


class PlannedDump(_Record):
    """Answer of ``/api/v1/dump``: the bundle that will be, and whose parts were asked for."""

    schema_version: Literal[1] = 1
    run_id: str
    bundle: str
    attempt: int
    round: int
    ranks: tuple[int, ...]
