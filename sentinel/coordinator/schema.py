"""The tables of ``sentinel.db`` and how an older file becomes a newer one.

Owns DDL, migrations and opening. Writing is in ``writer.py``, reading in ``store.py``.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal

MIGRATIONS: tuple[str, ...] = (
    # 1: first form
    """
    CREATE TABLE runs (
        run_id TEXT PRIMARY KEY,
        started_at REAL NOT NULL,
        ended_at REAL,
        world_size INTEGER NOT NULL DEFAULT 0,
        owner TEXT NOT NULL DEFAULT ''
    ) WITHOUT ROWID;
    CREATE TABLE incidents (
        run_id TEXT NOT NULL,
        id TEXT NOT NULL,
        kind TEXT NOT NULL,
        severity TEXT NOT NULL,
        state TEXT NOT NULL,
        opened_at TEXT NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (run_id, id)
    );
    CREATE INDEX incidents_by_time ON incidents (opened_at);
    CREATE TABLE events (
        id INTEGER PRIMARY KEY,
        run_id TEXT NOT NULL,
        received_at REAL NOT NULL,
        what TEXT NOT NULL,
        relay TEXT NOT NULL DEFAULT '',
        sequence INTEGER,
        body BLOB NOT NULL
    );
    CREATE INDEX events_by_run ON events (run_id, what, id);
    CREATE UNIQUE INDEX events_once ON events (run_id, relay, sequence) WHERE what = 'critical';
    CREATE TABLE counts (
        run_id TEXT NOT NULL,
        name TEXT NOT NULL,
        value INTEGER NOT NULL,
        PRIMARY KEY (run_id, name)
    ) WITHOUT ROWID;
    """,
)
SCHEMA = len(MIGRATIONS)


class StoreUnreadable(RuntimeError):
    """The incident database cannot be used; the text says which file and why, in one line."""


def open_for_writing(path: Path, synchronous: Literal["full", "normal"] = "full") -> sqlite3.Connection:
    """The one writing connection, migrated to this version's schema. Raises StoreUnreadable."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
        path.chmod(0o600)
    except (sqlite3.Error, OSError) as error:
        raise StoreUnreadable(f"{path} cannot be opened for writing: {error}") from error
    try:
        _prepare(connection, synchronous)
        _migrate(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise StoreUnreadable(f"{path} is not usable as an incident database: {error}") from error
    except StoreUnreadable:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection that never blocks the writer. Raises StoreUnreadable."""
    if not path.is_file():
        raise StoreUnreadable(f"no incident database at {path}")
    connection = _connect_read_only(path)
    try:
        version = _version(connection)
    except sqlite3.Error as error:
        connection.close()
        raise StoreUnreadable(f"{path} is not an incident database: {error}") from error
    if not 0 < version <= SCHEMA:
        connection.close()
        raise StoreUnreadable(_wrong_version(path, version))
    return connection


def _connect_read_only(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        connection = sqlite3.connect(uri, uri=True, timeout=5.0)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError:
        # A finished run on a read-only disk: WAL needs a shared-memory file that cannot be made, and nobody writes any more.
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise StoreUnreadable(f"{path} cannot be read: its directory is read-only while a log is pending") from None
        return sqlite3.connect(f"{uri}&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise StoreUnreadable(f"{path} is not an incident database: {error}") from error


def _prepare(connection: sqlite3.Connection, synchronous: str) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL" if synchronous == "normal" else "PRAGMA synchronous = FULL")


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = _version(connection)
    if version > SCHEMA:
        raise StoreUnreadable(_wrong_version(path, version))
    if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreUnreadable(f"{path} is a database of something else")
    for number in range(version, SCHEMA):
        # The version moves inside the same transaction, so that a crash leaves either form whole.
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _wrong_version(path: Path, version: int) -> str:
    if version == 0:
        return f"{path} is not an incident database"
    return f"{path} has schema {version}, this version of sentinel knows up to {SCHEMA}: use a newer sentinel"
