"""Names that agents, relays and coordinators spell alike."""

from __future__ import annotations

import re

from sentinel.wire import names
from sentinel.wire.names import bundle_id, rank_directory


def test_bundle_ids_sort_as_their_rounds_do() -> None:
    """A listing of the directory is in order of rounds."""
    rounds = [0, 7, 10, 999, 123_456]
    ids = [bundle_id(0, number) for number in rounds]
    assert ids == sorted(ids)
    assert ids[1] == "a0-r000007"


def test_rank_directories_sort_as_ranks_do() -> None:
    """Also in large worlds."""
    directories = [rank_directory(rank) for rank in (0, 9, 10, 16_383)]
    assert directories == sorted(directories)
    assert directories[0] == "rank-00000"


def test_names_are_plain_file_names() -> None:
    """Whatever the numbers, nothing of a path and nothing a shell reads."""
    for name in (bundle_id(12, 10**7), rank_directory(10**6), bundle_id(0, -1)):
        assert re.fullmatch(r"[a-z0-9-]+", name)


def test_environment_variables_are_ours_and_distinct() -> None:
    """One prefix, no name twice."""
    variables = [value for name, value in vars(names).items() if name.startswith("ENV_")]
    assert all(variable.startswith("SENTINEL_") for variable in variables)
    assert len(set(variables)) == len(variables)


def test_files_of_a_run_directory_are_distinct() -> None:
    """No two parts of the system write the same file."""
    files = [names.DATABASE, names.BUNDLES, names.JOIN_FILE, names.RUN_FILE, names.SPOOL]
    assert len(set(files)) == len(files)
