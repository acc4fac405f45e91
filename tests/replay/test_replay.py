"""Replays of real trainings: first bad op, samples, causes, and that nothing of the user's is touched."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded import SENTINEL, Record, sentinel

pytestmark = pytest.mark.e2e


def hashes(place: Path) -> dict[str, str]:
    """SHA-256 of every file below ``place``, the run directory left out."""
    files = [p for p in place.rglob("*") if p.is_file() and place / "run" not in p.parents]
    return {str(p.relative_to(place)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def descendants(pid: int, depth: int) -> list[int]:
    """Processes that ``pid``'s children have started, ``depth`` generations below it."""
    found = [pid]
    for _ in range(depth):
        found = [int(one) for parent in found for one in children(parent)]
    return found


def children(pid: int) -> list[str]:
    """Direct children of all threads of a process; none if it is gone."""
    try:
        return [one for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def alive(pid: int) -> bool:
    """True if the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def waited_for(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What ``look`` returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("waited in vain")


@pytest.mark.parametrize("planted", ["5", "5,40"])
def test_planted_samples_are_found_exactly(record: Record, planted: str) -> None:
    """Constant samples in a batch of 64 are named, all of them and no other, and replacing them makes the step finite."""
    found = record("loader.py", planted).replay("--precision", "same,fp32")
    assert found["samples"] == [int(one) for one in planted.split(",")]
    assert found["samples_confirmed"] is True
    assert found["cause"] == "data"
    assert found["precision"]["fp32"] == "nonfinite"


def test_the_normalising_line_is_named(record: Record) -> None:
    """The first bad op is the division before the model, with its line, its zero divisor and the rule that explains it."""
    found = record("loader.py", "5").replay("--precision", "same", "--no-samples")
    op = found["first_bad_op"]
    assert (op["op"], op["phase"], op["kind"]) == ("aten.div.Tensor", "forward", "created")
    assert "signal.std" in op["code"]
    assert op["rows"] == [5]
    assert op["inputs"][1]["zeros"] == 1
    assert [one["rule"] for one in found["lint"]] == ["division_by_std"]


def test_recorded_gradients_come_back_bit_by_bit(record: Record) -> None:
    """Dropout, BatchNorm and a DataLoader with workers: the step that is replayed is the very step that was recorded."""
    found = record("loader.py", "9", "2").replay("--precision", "same", "--no-samples")
    compared = found["trials"][0]["gradients"]
    assert len(compared) == 6
    assert [one["different"] for one in compared] == [0] * 6
    assert found["trials"][0]["loss_equal"] is True
    assert found["trials"][0]["inputs"] == "fed"


def test_the_users_directory_is_not_touched(record: Record) -> None:
    """A script that saves and logs at every step is replayed: its files hash the same, and the writes are listed."""
    trained = record("loader.py", "5")
    before = hashes(trained.place)
    found = trained.replay("--precision", "same")
    assert hashes(trained.place) == before
    assert any("train-1.log" in line for line in found["diverted"])


def test_the_record_lies_beside_the_parts(record: Record) -> None:
    """The record is kept in the bundle's directory, equal to what was printed, and the bundle is still as committed."""
    trained = record("loader.py", "5")
    found = trained.replay("--precision", "same", "--no-samples")
    assert json.loads((trained.bundle / "replay-rank-00001.json").read_text()) == found
    assert sentinel(["dump", "verify", str(trained.bundle)], trained.place).returncode == 0


def test_a_bit_flip_is_transient(record: Record) -> None:
    """A NaN that a replay does not reproduce, all other bits being equal, was no fault of the code."""
    found = record("flip.py", "flip").replay("--precision", "same")
    assert (found["reproduced"], found["cause"], found["verdict"]) == (False, "hardware", "transient")
    assert sum(one["different"] for one in found["trials"][0]["gradients"]) == 1


def test_a_deterministic_nan_is_not_transient(record: Record) -> None:
    """The same NaN written by the code itself comes back, and is located in the user's own backward."""
    found = record("flip.py", "rule").replay("--precision", "same")
    assert found["reproduced"] is True
    assert found["cause"] != "hardware"
    assert found["first_bad_op"]["code"] == 'made[3, 5] = float("nan")'


def test_a_noisy_kernel_is_no_hardware_fault(record: Record) -> None:
    """Where two replays differ from each other, nothing is said about the hardware."""
    found = record("flip.py", "noise").replay("--precision", "same")
    assert (found["cause"], found["verdict"]) == ("unknown", "nondeterministic")


def test_sharded_training_is_replayed_in_one_process(record: Record) -> None:
    """FSDP2 over four ranks: full parameters come from all shards, and gradients are those recorded."""
    found = record("sharded.py", ranks=4).replay("--precision", "same")
    assert found["rank"] == 2
    assert found["first_bad_op"]["op"] == "aten.div.Tensor"
    assert "mask.sum()" in found["first_bad_op"]["code"]
    compared = found["trials"][0]["gradients"]
    assert compared
    assert [one["different"] for one in compared] == [0] * len(compared)
    assert found["trials"][0]["loss_equal"] is True


def test_a_healthy_step_blames_nothing(record: Record) -> None:
    """A forced dump of a healthy step is replayed to the same loss, and nothing is blamed."""
    trained = record("loader.py", "5", dump_round=1)
    found = trained.replay("--precision", "same,bf16")
    assert found["round"] == 1
    assert (found["reproduced"], found["first_bad_op"], found["verdict"]) == (False, None, "nothing_nonfinite")
    assert found["trials"][0]["loss_equal"] is True


def test_an_innocent_rank_is_finite(record: Record) -> None:
    """The other rank's own step is finite, and its replay says whose is not."""
    found = record("loader.py", "5").replay("--rank", "0", "--precision", "same")
    assert found["trials"][0]["nonfinite"] is False
    assert found["first_bad_op"] is None
    assert found["verdict"] == "another_rank"
    assert "rank 1" in found["reason"]


def test_a_moved_script_is_said_in_one_line(record: Record) -> None:
    """Without the script there is no replay: one line says which file is missing, and --script helps."""
    trained = record("loader.py", "5")
    moved = trained.place / "moved.py"
    script = trained.place / "loader.py"
    script.rename(moved)
    try:
        ran = sentinel(["replay", str(trained.bundle)], trained.place)
        assert ran.returncode == 1
        assert ran.stderr.splitlines()[0] == f"sentinel: error: the script {script} is not here"
        assert "Traceback" not in ran.stderr
        assert trained.replay("--script", str(moved), "--precision", "same", "--no-samples")["reproduced"]
    finally:
        moved.rename(script)


def test_an_entry_function_stands_in_for_the_script(record: Record) -> None:
    """--entry calls a function with the recorded batch; its loss is run backward and blamed like the script's."""
    trained = record("loader.py", "5")
    (trained.place / "entry.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(16, 1)\n"
        "def step(batch):\n"
        "    signal, target = batch\n"
        "    return (model(signal / signal.std(1, keepdim=True)) - target).square().mean()\n"
    )
    found = trained.replay("--entry", "entry:step", "--precision", "same", "--no-samples")
    assert found["first_bad_op"]["line"] == "entry.py:5"


def test_a_loop_that_needs_its_gradients_is_run_with_them(record: Record) -> None:
    """A script that asks autograd on the way is replayed by running its backwards, and the note says why."""
    found = record("penalty.py", "grad").replay("--precision", "same", "--no-samples")
    assert found["reproduced"] is True
    assert "x.norm(" in found["first_bad_op"]["code"]
    assert found["trials"][0]["status"] == "script_raised"
    assert any("without gradients did not get there" in note for note in found["notes"])


def test_a_loss_that_refuses_its_input_is_replayed_to_the_cause(record: Record) -> None:
    """A step that came to no loss, since the loss function itself raised: first bad op and sample are found all the same."""
    found = record("refusing.py").replay("--precision", "same,fp32")
    assert (found["reproduced"], found["rank"], found["step"]) == (True, 1, 2)
    assert found["first_bad_op"]["op"].startswith("aten.div")
    assert "x.std(1, keepdim=True)" in found["first_bad_op"]["code"]
    assert (found["samples"], found["cause"]) == ([4], "data")
    assert "what was left of the forward (probability in <module>" in found["trials"][0]["sink"]


def test_a_backward_that_anomaly_detection_ended_is_replayed_to_its_end(record: Record) -> None:
    """The script's own detection is left out of the replay: it would end that at the same place, with nothing to look at."""
    found = record("anomalous.py").replay("--precision", "same,fp32")
    assert (found["reproduced"], found["rank"], found["step"]) == (True, 1, 2)
    assert found["first_bad_op"]["node"] == "SqrtBackward0"
    assert "sqrt().mean()" in found["first_bad_op"]["code"]


def test_a_large_job_s_replicas_are_written_by_some_for_all(record: Record) -> None:
    """Of six ranks the suspect, the first and the last write parameters; an onlooker is replayed with theirs, bit for bit."""
    trained = record("many.py", ranks=6)
    with_parameters = [p.parent.name for p in sorted(trained.bundle.glob("rank-*/parameters.safetensors"))]
    assert with_parameters == ["rank-00000", "rank-00002", "rank-00005"]
    found = trained.replay("--precision", "same", "--no-samples")
    assert (found["reproduced"], found["rank"]) == (True, 2)
    healthy = trained.replay("--rank", "3", "--precision", "same", "--no-samples")
    same, *_ = [trial for trial in healthy["trials"] if trial["precision"] == "same"]
    assert (same["status"], same["loss_equal"], same["nonfinite"]) == ("replayed", True, False)
    assert not any("weights" in note for note in same["notes"])


def test_a_loop_that_misses_its_peers_is_entered_at_once(record: Record) -> None:
    """A script that fails alone before the recorded round is replayed from its first forward, with the recorded inputs."""
    found = record("penalty.py", "world").replay("--precision", "same", "--no-samples")
    assert found["reproduced"] is True
    assert "x.norm(" in found["first_bad_op"]["code"]
    assert found["first_bad_op"]["rows"] == [4]
    assert [trial["inputs"] for trial in found["trials"]][2] == "substituted"
    assert "a worker is missing" in " ".join(found["notes"])


def test_a_script_that_cannot_be_replayed_says_why(record: Record) -> None:
    """Exit 1, the script's own error with its line, and the three lines of an entry function."""
    trained = record("penalty.py", "grad")
    script = trained.place / "penalty.py"
    text = script.read_text()
    script.write_text(text.replace("output = model(x)", "raise ValueError('this machine is not the cluster')"))
    try:
        ran = sentinel(["replay", str(trained.bundle)], trained.place)
    finally:
        script.write_text(text)
    assert ran.returncode == 1
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("Not replayed")
    assert "ValueError: this machine is not the cluster (penalty.py:" in lines[1]
    assert sum("replay_step" in line or "model," in line for line in lines) >= 3
    assert "Traceback" not in ran.stdout + ran.stderr


def test_a_replay_that_is_killed_leaves_no_process(record: Record) -> None:
    """Even SIGKILL to the command ends the trial that runs, with what it has started."""
    trained = record("loader.py", "5")
    hanging = trained.place / "hanging.py"
    hanging.write_text("import time\ntime.sleep(300)\n")
    words = [*SENTINEL, "replay", str(trained.bundle), "--script", str(hanging)]
    with subprocess.Popen(words, cwd=trained.place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        trial = waited_for(lambda: descendants(process.pid, depth=2))
        process.kill()
    waited_for(lambda: not any(alive(pid) for pid in trial))


def test_the_text_page_reads_from_the_verdict_down(record: Record) -> None:
    """For people: verdict, first bad op with its code line, precisions, evidence, next steps; no JSON, no traceback."""
    trained = record("loader.py", "5")
    ran = sentinel(["replay", str(trained.bundle)], trained.place)
    assert ran.returncode == 0
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("Reproduced: step 3 of rank 1")
    assert lines[1].startswith("data: ")
    assert "sample 5 of the batch does it" in lines[1]
    assert any(line.startswith("line") and "signal.std" in line for line in lines)
    assert "Evidence" in lines
    assert "Next" in lines
    assert ran.stderr == ""
