"""What can still be changed once a run's coordinator is gone: a person's word on an incident.

Owns that change. It takes the coordinator's own lock, so that the database has one writer at any time.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from sentinel.coordinator.store import IncidentReader
from sentinel.coordinator.writer import LogAcknowledged, PutIncident, StoreWriter, Write
from sentinel.incidents.events import Acknowledged
from sentinel.incidents.model import Incident, utc
from sentinel.wire.names import DATABASE, LOCK_FILE

WRITE_SECONDS = 10.0


def acknowledge(run_dir: Path, run_id: str, word: Acknowledged) -> Incident | None:
    """Keep the word on an incident of an ended run; None if there is no such incident.

    Raises BlockingIOError if a coordinator works in ``run_dir`` after all, OSError if it cannot be written, StoreUnreadable.
    """
    fd = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _write(run_dir, run_id, word)
    finally:
        os.close(fd)


def _write(run_dir: Path, run_id: str, word: Acknowledged) -> Incident | None:
    with IncidentReader(run_dir) as reader:
        incident = reader.incident(word.incident_id, run_id)
    if incident is None:
        return None
    acknowledged, writes = with_word(incident, word, time.time())
    writer = StoreWriter(run_dir / DATABASE)
    writer.start()
    writer.submit(writes)
    if not writer.close(WRITE_SECONDS) or writer.faults:
        raise OSError("the incident database does not accept the change")
    return acknowledged


def with_word(incident: Incident, word: Acknowledged, now: float) -> tuple[Incident, list[Write]]:
    """The incident with the word on it, and what keeps both on disk."""
    said = {"acknowledged_at": utc(now), "acknowledged_by": word.by, "acknowledged_note": word.note}
    acknowledged = incident.model_copy(update={**said, "updated_at": utc(now)})
    logged = LogAcknowledged(incident.run_id, now, word.incident_id, word.by, word.note)
    return acknowledged, [logged, PutIncident(acknowledged)]
