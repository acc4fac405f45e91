"""The injection: every Python under the launcher finds our ``sitecustomize``, and nothing else about it changes."""

from __future__ import annotations

import ast
import os
import sys
import time
import types
from pathlib import Path

import pytest
from watched import SITE, injected, run_python

from sentinel.wire import names
from sentinel_agent.inject import hooks

SHOW_PREPARED = (
    "import sys; from sentinel_agent.inject.lazy import AfterImport;"
    "print(sum(isinstance(f, AfterImport) for f in sys.meta_path))"
)


def _run(directory: Path, *arguments: str | Path, **more: str) -> str:
    """Standard output of a Python under injection; there must be nothing on standard error."""
    ran = run_python(arguments, injected(**more), cwd=directory)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout


def _site(directory: Path, text: str) -> str:
    """A directory with another ``sitecustomize``, behind ours on the path."""
    directory.mkdir(exist_ok=True)
    (directory / "sitecustomize.py").write_text(text)
    return f"{SITE}{os.pathsep}{directory}"


# --- children without torch --------------------------------------------------------------------------------------------


def test_a_child_is_prepared_without_importing_anything_heavy(tmp_path: Path) -> None:
    """One finder waits on the meta path; to put it there only the hooks are loaded, and nothing that takes time."""
    script = "import sys; print(*sorted(sys.modules))"
    added = set(_run(tmp_path, "-c", script).split()) - set(
        _run(tmp_path, "-c", script, **{names.ENV_AGENT: "0"}).split()
    )
    ours = {name for name in added if name.startswith("sentinel")}
    assert ours == {f"sentinel_agent{name}" for name in ("", ".inject", ".inject.hooks", ".inject.lazy")}
    assert not {name.split(".")[0] for name in added} & {
        "torch",
        "zmq",
        "msgspec",
        "numpy",
        "json",
        "socket",
        "pathlib",
    }
    assert _run(tmp_path, "-c", SHOW_PREPARED) == "1\n"


def test_a_process_that_was_not_asked_for_is_left_alone(tmp_path: Path) -> None:
    """Without the launcher's variable, the path alone does nothing."""
    script = "import sys; print([m for m in sys.modules if m.startswith('sentinel')])"
    assert _run(tmp_path, "-c", script, **{names.ENV_AGENT: "0"}) == "[]\n"


def test_the_price_of_a_child_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the injection adds to a bare child is measured against a child without it, and shown."""
    with_it, without = injected(), injected(**{names.ENV_AGENT: "0"})
    without["PYTHONPATH"] = ""
    fastest = {"with": float("inf"), "without": float("inf")}
    for _ in range(5):
        for which, environment in (("without", without), ("with", with_it)):
            began = time.perf_counter()
            assert run_python(["-c", "pass"], environment, cwd=tmp_path).returncode == 0
            fastest[which] = min(fastest[which], time.perf_counter() - began)
    with capsys.disabled():
        added = (fastest["with"] - fastest["without"]) * 1e3
        print(f"\n  a child without torch: {fastest['without'] * 1e3:.1f} ms, the injection adds {added:.1f} ms")


def test_the_sitecustomize_that_ours_hides_is_run(tmp_path: Path) -> None:
    """A cluster's own sitecustomize does its work, and is what ``import sitecustomize`` gives."""
    path = _site(tmp_path / "other", "import sys\nsys.cluster = 'ready'\nname = __name__\n")
    script = "import sys, sitecustomize; print(sys.cluster, sitecustomize.name, sitecustomize.__file__)"
    told, name, file = _run(tmp_path, "-c", script, PYTHONPATH=path).split()
    assert (told, name, file) == ("ready", "sitecustomize", str(tmp_path / "other" / "sitecustomize.py"))
    assert _run(tmp_path, "-c", SHOW_PREPARED, PYTHONPATH=path) == "1\n"


def test_another_one_that_chains_is_no_loop(tmp_path: Path) -> None:
    """A sitecustomize that itself looks for the next one, and finds ours again, ends."""
    chaining = (
        "import sys, os\n"
        "sys.chained = getattr(sys, 'chained', 0) + 1\n"
        "here = os.path.dirname(os.path.abspath(__file__))\n"
        "path, sys.path = sys.path, [p for p in sys.path if os.path.abspath(p) != here]\n"
        "sys.modules.pop('sitecustomize', None)\n"
        "import sitecustomize\n"
        "sys.path = path\n"
    )
    path = _site(tmp_path / "other", chaining)
    assert _run(tmp_path, "-c", "import sys; print(sys.chained)", PYTHONPATH=path) == "1\n"
    assert _run(tmp_path, "-c", SHOW_PREPARED, PYTHONPATH=path) == "1\n"


def test_two_copies_of_ours_are_no_loop(tmp_path: Path) -> None:
    """A launcher inside a launcher of another installation has two of our directories on the path."""
    (tmp_path / "copy").mkdir()
    path = _site(tmp_path / "copy", (SITE / "sitecustomize.py").read_text())
    assert _run(tmp_path, "-c", SHOW_PREPARED, PYTHONPATH=path) == "1\n"


def test_the_same_directory_twice_is_no_loop(tmp_path: Path) -> None:
    """A launcher inside a launcher puts the same directory on the path twice."""
    assert _run(tmp_path, "-c", SHOW_PREPARED, PYTHONPATH=f"{SITE}{os.pathsep}{SITE}") == "1\n"


def test_an_error_in_the_hidden_one_is_told_as_python_does(tmp_path: Path) -> None:
    """Python reports a broken sitecustomize and goes on; so it is with one behind ours."""
    path = _site(tmp_path / "other", "raise ValueError('of its own')\n")
    ran = run_python(["-c", SHOW_PREPARED], injected(PYTHONPATH=path), cwd=tmp_path)
    assert ran.returncode == 0
    assert ran.stdout == "1\n"
    assert "of its own" in ran.stderr


def test_a_python_without_the_agent_says_so_in_one_line(tmp_path: Path) -> None:
    """An interpreter of another environment cannot import the agent; its script runs, unwatched."""
    (tmp_path / "sentinel_agent.py").write_text("# in the way of the real one\n")
    path = f"{SITE}{os.pathsep}{tmp_path}"
    ran = run_python(["-c", "print('ran')"], injected(PYTHONPATH=path), cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    assert ran.stderr.startswith("sentinel: agent cannot be imported")
    assert ran.stderr.count("\n") == 1


def test_a_module_runs_as_a_module(tmp_path: Path) -> None:
    """``python -m`` finds the user's package, with its own name, arguments and path."""
    package = tmp_path / "of_the_user"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:], sys.path[0])\n")
    arguments = ["-m", "of_the_user", "--flag", "7"]
    plain = run_python(arguments, {**injected(), names.ENV_AGENT: "0", "PYTHONPATH": ""}, cwd=tmp_path)
    assert _run(tmp_path, *arguments) == plain.stdout


# --- in this process ---------------------------------------------------------------------------------------------------


def test_preparing_twice_prepares_once(fresh_process: None) -> None:
    """However the hooks are reached, by injection and by attach, they are registered once."""
    hooks.prepare()
    finders = list(sys.meta_path)
    hooks.prepare()
    assert sys.meta_path == finders


def test_a_fault_while_tapping_a_module_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """If a name that we tap is gone from torch, its import goes on and one line says so."""
    hooks._guarded(hooks._constructor_tap)(types.ModuleType("torch.nn.parallel.distributed"))
    printed = capsys.readouterr().err
    assert printed.startswith("sentinel: cannot tap torch.nn.parallel.distributed")
    assert printed.count("\n") == 1


# --- with torch --------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, warnings
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
warnings.simplefilter("ignore")

def train():
    torch.manual_seed(dist.get_rank())
    samples = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x, y in DataLoader(samples, batch_size=4, shuffle=True, num_workers=2):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item(), [p.flatten().tolist() for p in model.parameters()], torch.get_rng_state().tolist()

def main(rank, directory):
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 2), rank=rank, world_size=2)
    from sentinel_agent import process
    agent = process.current()
    watched = train()
    told = (agent.ledger.last_closed, dict(agent.health.faults))
    process.detach()
    same = train() == watched
    with open(f"{directory}/out-{rank}", "w") as out:
        print(repr((*told, agent.ledger.last_closed, same)), file=out)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.e2e
def test_spawned_ranks_with_loader_workers_are_watched(tmp_path: Path) -> None:
    """Ranks of ``mp.spawn`` are injected too, their DataLoader workers are left alone, and detached they train the same."""
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = run_python([tmp_path / "train.py", tmp_path], injected(**{names.ENV_RUN_DIR: str(tmp_path)}), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "sentinel" not in ran.stderr
    for rank in (0, 1):
        last, faults, last_detached, same = ast.literal_eval((tmp_path / f"out-{rank}").read_text())
        assert (last, faults) == (3, {})
        assert last_detached == 3
        assert same
