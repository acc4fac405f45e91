"""A replayed script writes nothing outside of the scratch directory, whichever way it tries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PROGRAM = """
import io, json, os, pathlib, shutil, sqlite3, sys, tempfile
import torch, numpy
import safetensors.torch
from sentinel_agent.replay.sandbox import Sandbox

for name, attempt in json.load(sys.stdin).items():
    root = pathlib.Path(sys.argv[1], name.replace(" ", "-"))
    scratch, place = root / "scratch", root / "place"
    scratch.mkdir(parents=True)
    (place / "folder").mkdir(parents=True)
    (place / "old.txt").write_text("old")
    (place / "folder" / "kept").write_text("kept")
    pid = os.fork()
    if pid == 0:
        sandbox = Sandbox(scratch)
        sandbox.install()
        os.chdir(place)
        exec(attempt)
        (scratch / "listed.json").write_text(json.dumps(list(sandbox.diverted)))
        os._exit(0)
    os.waitpid(pid, 0)
"""

ATTEMPTS = {
    "open": "open('new.txt', 'w').write('x')",
    "append": "open('old.txt', 'a').write('x'); assert open('old.txt').read() == 'oldx'",
    "pathlib": "pathlib.Path('new.txt').write_text('x')",
    "os.open": "os.close(os.open('new.txt', os.O_CREAT | os.O_WRONLY))",
    "torch.save": "torch.save(torch.ones(1), 'new.pt')",
    "torch.save to a file": "torch.save(torch.ones(1), open('new.pt', 'wb'))",
    "safetensors": "safetensors.torch.save_file({'a': torch.ones(1)}, 'new.safetensors')",
    "numpy": "numpy.save('new.npy', numpy.ones(1))",
    "mkdir": "os.makedirs('a/b', exist_ok=True); pathlib.Path('c').mkdir(); open('a/b/f', 'w').write('x')",
    "rename": "os.replace('old.txt', 'renamed.txt'); pathlib.Path('old.txt').rename('other.txt')",
    "remove": "os.remove('old.txt'); pathlib.Path('old.txt').unlink()",
    "rmtree": "shutil.rmtree('folder')",
    "copy": "shutil.copy('old.txt', 'copy.txt')",
    "sqlite": "sqlite3.connect('new.db').execute('create table t (a)')",
    "free": (
        "open('old.txt').read(); tempfile.NamedTemporaryFile().close(); torch.save(torch.ones(1), io.BytesIO()); "
        "(scratch / 'x').write_text('y'); sqlite3.connect(':memory:')"
    ),
    "slips past": (
        "import _io\ntry:\n    _io.FileIO('new.txt', 'w')\nexcept PermissionError as error:\n    print(error)"
    ),
}


class Tried(NamedTuple):
    """What an attempt left: the list of what was turned aside, and the files and folders of the user's directory."""

    listed: list[str]
    files: dict[str, str]
    folders: list[str]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tried]:
    """Every attempt, each in a process of its own, forked from one that has imported torch."""
    root = tmp_path_factory.mktemp("sandbox")
    subprocess.run(
        [sys.executable, "-c", PROGRAM, root], input=json.dumps(ATTEMPTS), text=True, timeout=100, check=True
    )
    return {name: _left(root / name.replace(" ", "-")) for name in ATTEMPTS}


def _left(root: Path) -> Tried:
    place = root / "place"
    found = sorted(place.rglob("*"))
    files = {str(p.relative_to(place)): p.read_text() for p in found if p.is_file()}
    folders = [str(p.relative_to(place)) for p in found if p.is_dir()]
    return Tried(json.loads((root / "scratch" / "listed.json").read_text()), files, folders)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_users_directory_stays_as_it_is(tried: dict[str, Tried], name: str) -> None:
    """Whichever way a script tries to write, its folder is as before and the script goes on."""
    assert tried[name].files == {"old.txt": "old", "folder/kept": "kept"}
    assert tried[name].folders == ["folder"]


@pytest.mark.parametrize("name", [name for name in ATTEMPTS if name not in ("free", "slips past")])
def test_what_was_turned_aside_is_listed(tried: dict[str, Tried], name: str) -> None:
    """Each such write is named with its path, and none had to be refused."""
    assert tried[name].listed
    assert not any(line.startswith("refused") for line in tried[name].listed)


def test_scratch_temporary_files_and_memory_are_free(tried: dict[str, Tried]) -> None:
    """Reads, temporary files, buffers in memory and the scratch directory itself are nobody's loss."""
    assert tried["free"].listed == []


def test_what_slips_past_is_refused(tried: dict[str, Tried]) -> None:
    """A write through a function that is not replaced is refused by the audit hook, and listed."""
    assert [line.split(":")[0] for line in tried["slips past"].listed] == ["refused"]
