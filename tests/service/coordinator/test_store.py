"""The database: what was committed is there, whoever is killed, and what is no database says so."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from relay_client import closed, evidence, wait_until

from sentinel.coordinator.schema import SCHEMA, open_for_writing
from sentinel.coordinator.store import IncidentReader, LoggedEvent, StoreUnreadable, with_ticks
from sentinel.coordinator.writer import (
    TRIMMED,
    LogEnded,
    LogExpect,
    LogFrame,
    PutCounts,
    PutIncident,
    PutRun,
    StoreWriter,
    Write,
)
from sentinel.incidents.events import Expect, Received, RunEnded, Tick
from sentinel.incidents.model import Attribution, Cause, Incident, Kind, RankFinding, Severity, Stage, State, utc
from sentinel.wire.codec import encode_reports

OpenWriter = Callable[..., StoreWriter]


def an_incident(id_: str = "i-1", run_id: str = "run", **changes: object) -> Incident:
    """An incident with NaN in its evidence."""
    finding = RankFinding(rank=1, phase="raw", nan=3, absmax=float("nan"), loss=float("inf"))
    incident = Incident(
        id=id_,
        run_id=run_id,
        kind=Kind.NONFINITE_GRADIENT,
        severity=Severity.CRITICAL,
        step=7,
        round=7,
        attempt=0,
        stage=Stage.PRE_REDUCE,
        attribution=Attribution.RANK_LOCAL,
        suspect_ranks=(1,),
        parameters=("w",),
        cause=Cause.DATA,
        reason="because",
        opened_at=utc(10.0),
        updated_at=utc(10.0),
        state=State.OPEN,
        findings=(finding,),
    )
    return incident.model_copy(update=changes)


def frame(sequence: int, *, critical: bool = True, run_id: str = "run", relay: str = "r") -> LogFrame:
    """A logged frame, of evidence or of a healthy round."""
    content = encode_reports([evidence(0, sequence)] if critical else [closed(0, sequence)])
    return LogFrame(run_id, float(sequence), relay, sequence, critical, content)


@pytest.fixture
def open_writer(tmp_path: Path) -> Iterator[OpenWriter]:
    """Opens writers on one file and closes them at the end."""
    opened: list[StoreWriter] = []

    def open_(path: Path = tmp_path / "sentinel.db", **options: object) -> StoreWriter:
        writer = StoreWriter(path, **options)  # type: ignore[arg-type]
        writer.start()
        opened.append(writer)
        return writer

    yield open_
    for writer in opened:
        assert writer.close(10)


def commit(writer: StoreWriter, *writes: Write) -> None:
    """Submit and wait until it is on disk."""
    done = threading.Event()
    writer.submit(writes, done.set)
    assert done.wait(10)


def test_what_was_written_is_read_back_the_same(open_writer: OpenWriter, tmp_path: Path) -> None:
    """Runs, incidents (NaN in them too), events and counts survive the way through the file."""
    writer = open_writer()
    commit(
        writer,
        PutRun("run", 1.0, "key"),
        LogExpect("run", 1.5, 2),
        frame(2),
        frame(3, critical=False),
        PutIncident(an_incident()),
        PutCounts("run", {"reports": 5}),
        LogEnded("run", 9.0),
    )
    with IncidentReader(tmp_path) as reader:
        [run] = reader.runs()
        assert (run.run_id, run.world_size, run.incidents, run.counts) == ("run", 2, 1, {"reports": 5})
        assert (run.started_at, run.ended_at) == (utc(1.0), utc(9.0))
        assert reader.owner("run") == "key"
        read = reader.incident("i-1")
        assert read is not None
        assert read.model_dump_json() == an_incident().model_dump_json()
        assert list(reader.events("run")) == [
            LoggedEvent(1.5, Expect(2)),
            LoggedEvent(2.0, Received(evidence(0, 2))),
            LoggedEvent(3.0, Received(closed(0, 3))),
            LoggedEvent(9.0, RunEnded()),
        ]


def test_a_newer_state_replaces_an_incident(open_writer: OpenWriter, tmp_path: Path) -> None:
    """An incident is one row, in its newest state."""
    writer = open_writer()
    commit(writer, PutIncident(an_incident()), PutIncident(an_incident("i-2", opened_at=utc(5.0))))
    commit(writer, PutIncident(an_incident(state=State.RESOLVED, occurrences=4)))
    with IncidentReader(tmp_path / "sentinel.db") as reader:
        assert [(i.id, i.state, i.occurrences) for i in reader.incidents()] == [
            ("i-2", "open", 1),
            ("i-1", "resolved", 4),
        ]


def test_runs_with_the_same_incident_id_do_not_mix(open_writer: OpenWriter, tmp_path: Path) -> None:
    """Ids are per run: the same one in two runs is two incidents."""
    commit(open_writer(), PutIncident(an_incident()), PutIncident(an_incident(run_id="other", opened_at=utc(20.0))))
    with IncidentReader(tmp_path) as reader:
        assert [i.run_id for i in reader.incidents("run")] == ["run"]
        first, newest, absent = reader.incident("i-1", "run"), reader.incident("i-1"), reader.incident("i-9")
    assert first is not None
    assert newest is not None
    assert (first.run_id, newest.run_id, absent) == ("run", "other", None)


def test_a_frame_delivered_twice_is_logged_once(open_writer: OpenWriter, tmp_path: Path) -> None:
    """The log holds one row for each (run, relay, sequence), also over a restart of the writer."""
    commit(open_writer(), frame(1), frame(1), frame(1, relay="other"))
    with IncidentReader(tmp_path) as reader:
        assert list(reader.deliveries("run")) == [("r", 1), ("other", 1)]


def test_healthy_frames_are_bounded_and_evidence_is_kept(open_writer: OpenWriter, tmp_path: Path) -> None:
    """Beyond the cap the oldest healthy frames go, counted; no evidence does."""
    writer = open_writer(healthy_kept=50)
    commit(writer, *(frame(n, critical=n % 10 == 0) for n in range(400)))
    commit(writer, frame(400, critical=False))
    with IncidentReader(tmp_path) as reader:
        events = list(reader.events("run"))
        counts = dict(reader._rows("SELECT name, value FROM counts"))
    healthy = [e.at for e in events if not isinstance(e.event.report, type(evidence(0)))]  # type: ignore[union-attr]
    assert len(events) - len(healthy) == 40
    assert 50 <= len(healthy) <= 50 + 5 + 64
    assert counts[TRIMMED] == 361 - len(healthy)
    assert healthy[-1] == 400.0
    assert healthy == sorted(healthy)


def test_a_row_that_cannot_be_stored_is_counted_and_costs_only_itself(open_writer: OpenWriter, tmp_path: Path) -> None:
    """A poisoned row never blocks the queue behind it."""
    writer = open_writer()
    poisoned = LogFrame("run", 1.0, "r", 1 << 70, True, b"")
    commit(writer, frame(1), poisoned, PutIncident(an_incident()))
    assert writer.faults["store_row"] == 1
    with IncidentReader(tmp_path) as reader:
        assert len(reader.incidents()) == 1


def test_closing_commits_what_waits(open_writer: OpenWriter, tmp_path: Path) -> None:
    """Writes that nobody waits for are gathered, and are on disk after close."""
    writer = open_writer()
    for number in range(500):
        writer.submit([frame(number, critical=False)])
    assert writer.close(10)
    assert writer.backlog == 0
    with IncidentReader(tmp_path) as reader:
        assert sum(1 for _ in reader.events("run")) == 500


def test_readers_see_commits_while_the_writer_goes_on(open_writer: OpenWriter, tmp_path: Path) -> None:
    """One open reader sees each new commit and never blocks it."""
    writer = open_writer()
    with IncidentReader(tmp_path / "sentinel.db") as reader:
        for number in range(5):
            commit(writer, PutIncident(an_incident(f"i-{number}")))
            assert len(reader.incidents()) == number + 1


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    """No database is said in one line, with its path, and none is made."""
    for path in (tmp_path, tmp_path / "absent.db", tmp_path / "no" / "dir"):
        with pytest.raises(StoreUnreadable, match="no incident database at"):
            IncidentReader(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_one_clear_error(tmp_path: Path) -> None:
    """Text, noise, an empty file and somebody else's database are each refused, by readers and by writers."""
    (tmp_path / "text").write_text("hello, this is not a database at all\n" * 100)
    (tmp_path / "noise").write_bytes(random.Random(1).randbytes(8192))
    (tmp_path / "empty").write_bytes(b"")
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    for name in ("text", "noise", "empty", "other"):
        with pytest.raises(StoreUnreadable) as refused:
            IncidentReader(tmp_path / name)
        assert "\n" not in str(refused.value)
    for name in ("text", "noise", "other"):
        with pytest.raises(StoreUnreadable):
            StoreWriter(tmp_path / name).start()


def test_a_newer_schema_is_refused_by_name(open_writer: OpenWriter, tmp_path: Path) -> None:
    """A database of a later version is neither guessed at nor changed."""
    path = tmp_path / "sentinel.db"
    open_writer().close(10)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()
    with pytest.raises(StoreUnreadable, match="use a newer sentinel"):
        IncidentReader(path)
    with pytest.raises(StoreUnreadable, match="use a newer sentinel"):
        StoreWriter(path).start()


def test_a_damaged_file_is_an_error_and_not_a_traceback(open_writer: OpenWriter, tmp_path: Path) -> None:
    """Pages overwritten with noise are reported as unreadable, wherever they are met."""
    writer = open_writer()
    commit(writer, *(PutIncident(an_incident(f"i-{n}")) for n in range(200)))
    writer.close(10)
    path = tmp_path / "sentinel.db"
    content = bytearray(path.read_bytes())
    content[4096:] = random.Random(2).randbytes(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreUnreadable), IncidentReader(path) as reader:
        reader.incidents()


READ_AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from sentinel.coordinator.store import IncidentReader
if os.geteuid() == 0:
    os.setuid(65534)
with IncidentReader(Path(sys.argv[1])) as reader:
    print([incident.id for incident in reader.incidents()])
"""


def test_a_finished_run_is_readable_from_a_read_only_directory(open_writer: OpenWriter) -> None:
    """An archived run directory can be read by a user who may not write into it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        writer = open_writer(directory / "sentinel.db")
        commit(writer, PutIncident(an_incident()))
        assert writer.close(10)
        assert [path.name for path in directory.iterdir()] == ["sentinel.db"]
        (directory / "sentinel.db").chmod(0o444)
        directory.chmod(0o555)
        command = [sys.executable, "-c", READ_AS_ANOTHER_USER, name]
        read = subprocess.run(command, capture_output=True, text=True, timeout=30)
        directory.chmod(0o700)
    assert (read.stdout.strip(), read.stderr) == ("['i-1']", "")


def test_ticks_are_put_back_between_logged_events() -> None:
    """A replayed log has the passing of time in it, in a bounded number of steps."""
    log = [LoggedEvent(0.0, Expect(2)), LoggedEvent(0.35, Received(closed(0))), LoggedEvent(1e6, RunEnded())]
    ticked = list(with_ticks(log))
    assert [e for e in ticked if not isinstance(e.event, Tick)] == log
    assert [e.at for e in ticked] == sorted(e.at for e in ticked)
    assert [round(e.at, 2) for e in ticked if isinstance(e.event, Tick)][:4] == [0.1, 0.2, 0.3, 0.35]
    assert len(ticked) < 2000


CHILD = """
import sys, threading
from pathlib import Path
from sentinel.coordinator.writer import LogFrame, StoreWriter
from sentinel.wire.codec import encode_reports
start = int(sys.argv[2])
writer = StoreWriter(Path(sys.argv[1]))
writer.start()
number = start
while True:
    done = threading.Event()
    writer.submit([LogFrame("run", 0.0, "r", number, True, b"x" * (number % 5000))], done.set)
    done.wait()
    print(number, flush=True)
    number += 1
"""


def test_every_acknowledged_row_survives_kill_9(tmp_path: Path) -> None:
    """A writer killed ten times at random moments has kept every row it said was on disk, and the file is whole."""
    path = tmp_path / "sentinel.db"
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, acknowledged = random.Random(seed), 0
    for _ in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(acknowledged + 1)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(rng.randint(1, 60)):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        for line in child.stdout.read().splitlines():
            acknowledged = max(acknowledged, int(line))
        child.wait()
        child.stdout.close()
    with IncidentReader(path) as reader:
        stored = {sequence for _, sequence in reader.deliveries("run")}
        assert set(range(1, acknowledged + 1)) <= stored
        assert len(stored) <= acknowledged + 10
        assert list(reader._rows("PRAGMA integrity_check")) == [("ok",)]


def test_a_locked_database_is_retried_until_it_is_free(open_writer: OpenWriter, tmp_path: Path) -> None:
    """A backup that holds the write lock delays the commit; it does not lose it."""
    writer = open_writer()
    writer._connection.execute("PRAGMA busy_timeout = 10")
    blocker = open_for_writing(tmp_path / "sentinel.db")
    blocker.execute("BEGIN IMMEDIATE")
    done = threading.Event()
    writer.submit([frame(1), frame(2, critical=False)], done.set)
    wait_until(lambda: writer.faults["store_write"] > 0, "the commit is refused")
    assert writer.failing
    assert not done.is_set()
    blocker.execute("ROLLBACK")
    blocker.close()
    assert done.wait(10)
    assert not writer.failing
    assert writer._healthy["run"] == 1
