"""What following every op costs: a step of a 10 M-parameter transformer, plain and traced in turns, in one process.

Traced as a replay does it: the dispatch mode around forward, loss and backward, and every module's call on the module stack. The
recorded round of a replay is traced once, so what counts is how much longer a step takes, not what is kept.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sentinel_agent.replay.places import ModuleStack
from sentinel_agent.replay.tracer import Tracer

LIMIT = 4.0  # a traced step over a plain one
SHAPES = ((1, 16), (2, 32), (8, 128))
"""Batch and sequence length: from a step that is all overhead to one that computes."""


class Transformer(nn.Module):
    """A small language model: 9.8 M parameters, five blocks."""

    def __init__(self, vocabulary: int = 1000, width: int = 384, length: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 5, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, [batch, length, vocabulary], of tokens [batch, length]; a place sees only what is before it."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.places(torch.arange(length))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


@contextmanager
def traced(model: nn.Module) -> Iterator[Tracer]:
    """A tracer, and the module stack fed by hooks."""
    stack = ModuleStack()
    stack.name(model)
    enter = nn.modules.module.register_module_forward_pre_hook(lambda module, _args: stack.enter(module))
    leave = nn.modules.module.register_module_forward_hook(lambda _module, _args, _output: stack.leave())
    try:
        with Tracer(stack) as tracer:
            for name, parameter in model.named_parameters():
                tracer.arrived(parameter, f"parameter {name}")
            yield tracer
    finally:
        enter.remove()
        leave.remove()


def step(model: nn.Module, tokens: torch.Tensor) -> None:
    """Forward, loss and backward, as a replay runs them: it stops before the optimizer."""
    model.zero_grad()
    logits = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def measure(model: nn.Module, tokens: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Seconds of plain and traced steps, in random order, and how many ops a step has."""
    seconds: dict[str, list[float]] = {"plain": [], "traced": []}
    ops = 0
    order = random.Random(0)
    for number in range(rounds + 1):
        arms = ["plain", "traced"]
        order.shuffle(arms)
        for arm in arms:
            began = time.perf_counter()
            if arm == "traced":
                with traced(model) as tracer:
                    step(model, tokens)
                ops = tracer.ops
            else:
                step(model, tokens)
            if number:  # the first of each warms up
                seconds[arm].append(time.perf_counter() - began)
    return {**seconds, "ops": ops}


def main() -> int:
    """Print the figures; exit code 1 if one is over the limit."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=15, help="plain and traced steps of each shape")
    chosen = arguments.parse_args()
    torch.manual_seed(0)
    model = Transformer()
    print(
        f"transformer of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {torch.get_num_threads()} threads"
    )
    kept = True
    for batch, length in SHAPES:
        found = measure(model, torch.randint(0, 1000, (batch, length + 1)), chosen.rounds)
        ratio = statistics.median(b / a for a, b in zip(found["plain"], found["traced"], strict=True))
        plain, followed = (statistics.median(found[arm]) * 1e3 for arm in ("plain", "traced"))
        kept &= ratio <= LIMIT
        print(
            f"batch {batch:2d} x {length:3d}  plain {plain:7.1f} ms  traced {followed:7.1f} ms = {ratio:.2f} times "
            f"(at most {LIMIT:g}), {found['ops']} ops"
        )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
