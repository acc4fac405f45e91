"""What a part costs: its bandwidth beside that of plain safetensors on the same disk, and what keeping the window costs a step.

Both writers flush to the disk, take turns, and write the same parameters; a part also has statistics, batches, gradients of a
few tensors, a header and its renames. The window is fed between stretches of arithmetic as long as a step, so that caches are as
cold as in training.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from sentinel_agent.dump import PartRequest, write_part
from sentinel_agent.window import Window

SHARE = 0.8  # of plain safetensors' bandwidth, at least
STEP_SECONDS = 0.1
COST = 0.01  # of such a step, at most


def parameters(megabytes: int) -> list[tuple[str, torch.Tensor]]:
    """Float32 weights and biases as of a transformer's blocks, ``megabytes`` in all."""
    width = 1024
    block = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    size = 4 * sum(torch.Size(shape).numel() for shape in block)
    count = max(1, megabytes * 1_000_000 // size)
    return [(f"blocks.{b}.{i}", torch.randn(shape)) for b in range(count) for i, shape in enumerate(block)]


def plain(folder: Path, tensors: list[tuple[str, torch.Tensor]]) -> int:
    """Write them with the library and flush; returns the bytes."""
    path = folder / "plain.safetensors"
    save_file(dict(tensors), path)
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return path.stat().st_size


def part(folder: Path, tensors: list[tuple[str, torch.Tensor]], window: Window) -> int:
    """Write them as a part; returns the bytes."""
    result = write_part(
        PartRequest(
            run_dir=folder,
            run_id="bench",
            attempt=0,
            rank=0,
            world_size=1,
            node=0,
            round=0,
            step=0,
            state_after_step=False,
            reason="benchmark",
            entries=window.entries(0),
            named_parameters=tensors,
        )
    )
    if result.error:
        raise OSError(result.error)
    return result.bytes


def bandwidths(megabytes: int, rounds: int, folder: Path) -> tuple[list[float], list[float]]:
    """MB/s of plain files and of parts, in turns."""
    tensors, window = parameters(megabytes), Window()
    for _, tensor in tensors:
        tensor.grad = torch.randn(tensor.shape)  # a part has statistics of every gradient too
    window.forward_inputs((torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,))), {})
    writers: list[Callable[[Path], int]] = [lambda at: plain(at, tensors), lambda at: part(at, tensors, window)]
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for which, write in enumerate(writers):
            place = Path(tempfile.mkdtemp(dir=folder))
            began = time.perf_counter()
            size = write(place)
            if number:  # the first of each warms up
                found[which].append(size / 1e6 / (time.perf_counter() - began))
            shutil.rmtree(place)
    return found


def keeping(batch: tuple[torch.Tensor, ...], steps: int) -> list[float]:
    """Seconds of the training thread that the window takes in each of ``steps`` steps: loader, forward, end of round.

    A batch that the window held is given back in its call instead of the loop's, so every other step holds as many batches
    without a window, and what giving one back takes there is what the training would pay.
    """
    taken: tuple[list[float], list[float]] = ([], [])
    windows = Window(), _Held()
    one, other, memory = torch.randn(512, 512), torch.randn(512, 512), torch.zeros(16 << 20)
    for step in range(2 * steps):
        until = time.thread_time() + STEP_SECONDS / 5  # enough to empty the caches
        while time.thread_time() < until:
            one @ other
            memory.add_(1)
        fresh = tuple(tensor.clone() for tensor in batch)
        window, began = windows[step % 2], time.thread_time()
        rng = window.before_batch()
        window.loader_batch(fresh, tuple(range(64)), rng)
        window.forward_inputs(fresh, {})
        window.close_round(step // 2)
        taken[step % 2].append(time.thread_time() - began)
    return [a - b for a, b in zip(*taken, strict=True)]


class _Held:
    """Stands where the window does, and only holds as many batches."""

    def __init__(self) -> None:
        self._held: deque[object] = deque(maxlen=2)

    def before_batch(self) -> None:
        """Nothing is noted."""

    def loader_batch(self, batch: object, _indices: object, _rng: object) -> None:
        """Hold it; the oldest goes."""
        self._held.append(batch)

    def forward_inputs(self, _args: object, _kwargs: object) -> None:
        """Nothing is noted."""

    def close_round(self, _round: int) -> None:
        """Nothing is noted."""


def main() -> int:
    """Print the figures; exit code 1 if one is over its limit."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--megabytes", type=int, default=400, help="parameters of one part")
    arguments.add_argument("--rounds", type=int, default=7, help="files and parts written, each")
    arguments.add_argument("--steps", type=int, default=200, help="steps over which the window is timed")
    arguments.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sentinel-bench-", dir=chosen.folder) as folder:
        files, parts = bandwidths(chosen.megabytes, chosen.rounds, Path(folder))
    share = statistics.median(b / a for a, b in zip(files, parts, strict=True))
    print(f"plain safetensors, flushed  {statistics.median(files):.0f} MB/s ({chosen.megabytes} MB of parameters)")
    print(f"a part                      {statistics.median(parts):.0f} MB/s = {share:.2f} of that (at least {SHARE})")
    kept = True
    batches = {
        "tokens, 32 x 2048": (torch.randint(0, 50_000, (32, 2048)),) * 2,
        "images, 64 x 3 x 224 x 224": (torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))),
    }
    for name, batch in batches.items():
        cost = statistics.median(keeping(batch, chosen.steps)) / STEP_SECONDS
        kept &= cost <= COST
        print(
            f"window, {name:27s} {cost * STEP_SECONDS * 1e3:.2f} ms = {cost:.2%} of a 100 ms step (at most {COST:.0%})"
        )
    return 0 if share >= SHARE and kept else 1


if __name__ == "__main__":
    sys.exit(main())
