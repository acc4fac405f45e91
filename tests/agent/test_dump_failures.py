"""Writing a part where the disk or the process fails: an error in one line, and never half a part."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import header_of, leftovers, request, window_of
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from sentinel.bundle.manifest import BATCHES_FILE, PARAMETERS_FILE, PART_FILE, RNG_FILE, PartHeader
from sentinel_agent import dump
from sentinel_agent.dump import part_directory, write_part


def _in_child(act: Callable[[], str]) -> Iterator[str]:
    """Run ``act`` in a forked process: first yields its pid as text, then what it returned ('' if it died)."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the child only writes small tensors: no thread pool is used
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, act().encode())
        finally:
            os._exit(0)
    os.close(writer)
    yield str(pid)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    os.waitpid(pid, 0)
    yield answer


def _answer(act: Callable[[], str]) -> str:
    return list(_in_child(act))[1]


def test_a_file_size_limit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """Where the system refuses to let a file grow, the result says so and no directory remains."""
    wanted = request(tmp_path, named_parameters=[("w", torch.zeros(4096))])

    def act() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        return json.dumps(write_part(wanted).error)

    error = json.loads(_answer(act))
    assert error.startswith(f"{os.strerror(errno.EFBIG)} (EFBIG)")
    assert leftovers(tmp_path) == []


def test_a_directory_that_may_not_be_written_is_an_error() -> None:
    """An ordinary user without the right to write gets one line, no exception and nothing on disk."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        run_dir.chmod(0o555)

        def act() -> str:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            return json.dumps(write_part(request(run_dir)).error)

        error = json.loads(_answer(act))
        assert error == f"Permission denied (EACCES): {run_dir / 'bundles'}"
        assert list(run_dir.iterdir()) == []
        run_dir.chmod(0o755)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("may not mount a small file system here (needs root)")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_an_error_and_leaves_nothing(small_disk: Path) -> None:
    """With no space left the result says ENOSPC, and the little space is free again afterwards."""
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (248 << 10))
    free = os.statvfs(small_disk).f_bfree
    many = [(f"p{i}", torch.zeros(1)) for i in range(2000)]  # their statistics alone do not fit
    result = write_part(request(small_disk, level="stats", named_parameters=many))
    assert "(ENOSPC)" in result.error
    assert "\n" not in result.error
    assert leftovers(small_disk) == []
    filler.unlink()
    assert os.statvfs(small_disk).f_bfree > free
    assert write_part(request(small_disk)).error == ""


def test_a_small_disk_is_not_filled(small_disk: Path) -> None:
    """At most a fifth of the free space goes to tensors, whatever the caller allows."""
    result = write_part(request(small_disk, named_parameters=[("w", torch.zeros(20_000))]))
    assert "parameters left out" in header_of(result).reason


def test_a_read_only_disk_is_an_error(small_disk: Path) -> None:
    """A file system that turned read-only gives EROFS in one line."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    result = write_part(request(small_disk))
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert "(EROFS)" in result.error


def test_a_process_killed_while_writing_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL between two files there is only a hidden temporary directory, and a new process can write the part."""
    ready_reader, ready_writer = os.pipe()
    write_tensors = dump.write_tensors

    def write_and_wait(path: Path, tensors: Any) -> int:
        size = write_tensors(path, tensors)
        os.write(ready_writer, b"1")
        signal.pause()
        return size

    monkeypatch.setattr(dump, "write_tensors", write_and_wait)
    wanted = request(tmp_path, entries=window_of((torch.ones(4),)).entries(0))
    child = _in_child(lambda: write_part(wanted).error)
    pid = int(next(child))
    assert os.read(ready_reader, 1) == b"1"
    os.kill(pid, signal.SIGKILL)
    assert next(child) == ""
    monkeypatch.undo()
    assert leftovers(tmp_path) == [f".rank-00001.tmp-{pid}"]
    assert list((tmp_path / "bundles").glob("*/rank-*")) == []
    assert header_of(write_part(wanted)).rank == 1


def test_killed_at_any_moment_a_part_is_whole_or_absent(tmp_path: Path) -> None:
    """Whenever the kill comes, a directory with the part's name holds every file, readable to the end."""
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    choose = random.Random(seed)
    entries = window_of((torch.ones(4),)).entries(0)
    whole = 0
    for round_ in range(12):
        wanted = request(tmp_path, round=round_, entries=entries, named_parameters=[("w", torch.ones(9))])
        child = _in_child(lambda wanted=wanted: write_part(wanted).error)
        pid = int(next(child))
        time.sleep(choose.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        next(child)
        part = part_directory(tmp_path, 0, round_, 1)
        if part.exists():
            whole += 1
            assert PartHeader.model_validate_json((part / PART_FILE).read_bytes()).round == round_
            assert load_file(part / PARAMETERS_FILE)["w"].sum() == 9
            assert {file.name for file in part.iterdir()} == {PART_FILE, BATCHES_FILE, RNG_FILE, PARAMETERS_FILE}
    print(f"{whole} of 12 parts were whole")


def test_parameters_whose_storage_is_gone_are_left_out(tmp_path: Path) -> None:
    """A parameter that sharded training has freed is never read, and the part says what is missing."""
    gone = torch.ones(1000)
    gone.untyped_storage().resize_(0)
    result = write_part(request(tmp_path, named_parameters=[("w", gone)], nonfinite_gradients=[("w", gone)]))
    header = header_of(result)
    assert "parameters left out: w has" in header.reason
    assert header.parameter_statistics[0].minimum is None
    assert result.bytes < 4000


def test_tensors_that_run_python_are_read_by_one_thread_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are taken on a second thread for plain tensors alone: a FakeTensor's mode is not for two threads at once."""
    taken: list[object] = []
    monkeypatch.setattr(dump, "beside", lambda compute: taken.append(compute) or compute)
    with FakeTensorMode():
        fake = torch.ones(3)
    assert "tensor subclasses" in write_part(request(tmp_path, round=1, named_parameters=[("w", fake)])).error
    assert taken == []
    assert write_part(request(tmp_path, round=2, named_parameters=[("w", torch.ones(3))])).error == ""
    assert len(taken) == 1


def test_a_tensor_that_cannot_be_read_is_an_error_not_an_exception(tmp_path: Path) -> None:
    """Whatever torch raises while a tensor is read becomes one line, and nothing is left."""
    with FakeTensorMode():
        fake = torch.ones(3)
    result = write_part(request(tmp_path, named_parameters=[("w", fake)]))
    assert result.error
    assert "\n" not in result.error
    assert leftovers(tmp_path) == []
