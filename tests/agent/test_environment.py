"""What a bundle says about where it ran: enough to start again, and no secret."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sentinel_agent.environment import HIDDEN, environment, git_commit, harmless_variables, redacted_arguments


def test_only_variables_known_to_be_harmless_are_kept() -> None:
    """Ranks and library settings stay; anything else, and any name that smells of a secret, goes."""
    kept = harmless_variables(
        {
            "RANK": "1",
            "NCCL_DEBUG": "INFO",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": "1",
            "WANDB_API_KEY": "x",
            "TORCH_HUB_TOKEN": "x",
            "NCCL_SECRET": "x",
            "GLOO_PASSWORD": "x",
            "HOME": "/home/u",
            "torch_passphrase": "x",
        }
    )
    assert set(kept) == {"RANK", "NCCL_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"}


def test_secrets_on_the_command_line_are_hidden() -> None:
    """Both spellings of an option with a secret lose the value, and nothing else changes."""
    shown = redacted_arguments(
        ["train.py", "--lr", "0.1", "--api-key", "abc", "--hf_token=def", "--password", "--steps", "5"]
    )
    assert shown == (
        "train.py",
        "--lr",
        "0.1",
        "--api-key",
        HIDDEN,
        f"--hf_token={HIDDEN}",
        "--password",
        "--steps",
        "5",
    )


def test_the_record_describes_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Arguments, directory, versions, pid and harmless variables are those of the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--token=abc"])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MY_SECRET", "abc")
    found = environment()
    assert found.argv == ("train.py", f"--token={HIDDEN}")
    assert (found.cwd, found.pid, found.torch) == (str(tmp_path), os.getpid(), str(torch.__version__))
    assert found.variables["RANK"] == "3"
    assert "abc" not in found.model_dump_json()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory that looks like a checkout, made of files: no git is needed to read one."""
    git = tmp_path / "repo" / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs/heads/main").write_text("a" * 40 + "\n")
    return tmp_path / "repo"


def test_reads_a_branch_from_a_directory_below(checkout: Path) -> None:
    """The commit of the branch is found from anywhere inside the checkout."""
    (checkout / "src/deep").mkdir(parents=True)
    assert git_commit(checkout / "src/deep") == "a" * 40


def test_reads_a_detached_head_and_packed_refs(checkout: Path) -> None:
    """A commit checked out by itself, and a branch that was packed away, are both read."""
    (checkout / ".git/refs/heads/main").unlink()
    (checkout / ".git/packed-refs").write_text(f"# pack-refs\n{'b' * 40} refs/heads/main\n")
    assert git_commit(checkout) == "b" * 40
    (checkout / ".git/HEAD").write_text("c" * 40)
    assert git_commit(checkout) == "c" * 40


def test_a_head_that_is_no_commit_is_none(checkout: Path) -> None:
    """Whatever a file claims, only a hash is a commit."""
    (checkout / ".git/HEAD").write_text("ref: ../../../etc/passwd")
    assert git_commit(checkout) is None
    (checkout / ".git/HEAD").write_bytes(b"\xff\x00")
    assert git_commit(checkout) is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to make a worktree")
def test_reads_what_git_itself_would_say(tmp_path: Path) -> None:
    """In a real repository and in a worktree of it, the answer is git's own."""
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        quiet.pop(variable, None)

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=quiet, check=True, capture_output=True, text=True).stdout

    git("init", "-q", "repo")
    git("-C", "repo", "commit", "-q", "--allow-empty", "-m", "one")
    git("-C", "repo", "worktree", "add", "-q", "../tree")
    commit = git("-C", "repo", "rev-parse", "HEAD").strip()
    assert git_commit(tmp_path / "repo") == commit
    assert git_commit(tmp_path / "tree") == commit
    git("-C", "repo", "pack-refs", "--all")
    assert git_commit(tmp_path / "tree") == commit
