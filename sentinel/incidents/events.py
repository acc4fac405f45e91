"""What goes into the core and what comes out: events in, commands out.

Owns the vocabulary of ``Tracker.handle``. Reports of the wire are events as they are; the rest of the world (time passing, a
node's processes ending) comes in as the events below. Commands say what the shell must do; the core does nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from sentinel.incidents.model import Incident
from sentinel.wire.messages import Report


@dataclass(frozen=True, slots=True)
class Received:
    """A report of one rank of a run."""

    report: Report


@dataclass(frozen=True, slots=True)
class Expect:
    """How many ranks the run has, as a launcher or a Hello said."""

    world_size: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; open windows past their deadline are judged with what is there."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """No more reports will come: judge every open window now."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A person has seen an incident; ``by`` is who, ``note`` what they have to say of it. Changes nothing of the verdict."""

    incident_id: str
    by: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class DumpAsked:
    """Somebody wants every rank's part of one and the same round: ``ahead`` rounds after the newest that any rank has closed."""

    ahead: int


Event = Received | Expect | Tick | RunEnded | Acknowledged | DumpAsked


@dataclass(frozen=True, slots=True)
class SaveIncident:
    """Store this incident (new, or a newer state of a known id) and show it."""

    incident: Incident
    is_new: bool


@dataclass(frozen=True, slots=True)
class RequestParts:
    """Ask ``ranks`` to write their part of round ``round``: they did not see the fault themselves, or it lies ahead of them."""

    attempt: int
    round: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommitBundle:
    """Every part that will come has come (or the deadline passed): write the manifest. ``present`` maps rank to part."""

    bundle: str
    attempt: int
    round: int
    step: int
    world_size: int
    present: tuple[tuple[int, int, str, str], ...]  # rank, node, directory, error
    missing: tuple[int, ...]
    incidents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Tell these ranks that all their rounds are judged; they may exit."""

    attempt: int
    ranks: tuple[int, ...]


Command = SaveIncident | RequestParts | CommitBundle | Release
