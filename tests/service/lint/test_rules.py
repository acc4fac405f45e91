"""Where rules keep silent, and how far they see: guards, tests, names, and code that no gradient passes."""

from __future__ import annotations

import pytest

from sentinel.postmortem.lint.check import lint_text

IMPORTS = """\
import math
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""

GUARDED = [
    pytest.param("y = x / (x.std() + eps)", id="an epsilon by name"),
    pytest.param("y = x / x.std().clamp_min(1e-6)", id="a clamp"),
    pytest.param("y = x / max(x.std(), 1e-6)", id="Python's max"),
    pytest.param("s = x.std()\nif s > 0:\n    y = x / s", id="a test by name"),
    pytest.param("s = x.std()\ns[s == 0] = 1.0\ny = x / s", id="zeros replaced"),
    pytest.param("s = x.std()\ns.clamp_(min=1e-6)\ny = x / s", id="clamped in place"),
    pytest.param("s = x.std() + 1e-6\ny = x / s.unsqueeze(-1)", id="guarded before a reshape"),
    pytest.param("y = x / x.std() if x.numel() > 1 else x", id="a conditional expression"),
    pytest.param("y = x / std", id="a constant of the data set"),
    pytest.param("n = mask.sum()\nif mask.any():\n    y = x.sum() / n", id="the mask itself tested"),
    pytest.param("n = (labels != -100).sum()\nif n == 0:\n    raise ValueError\ny = x.sum() / n", id="an early exit"),
    pytest.param("y = x.sum() / mask.numel()", id="a count that is not of a selection"),
    pytest.param("q = torch.randn(8, 2)\nq = q / q.norm()", id="freshly drawn numbers"),
    pytest.param("y = math.sqrt(x.shape[-1]) * math.log(p) * p", id="plain numbers"),
    pytest.param("with torch.no_grad():\n    d = torch.sqrt(((a - b) ** 2).sum(-1))", id="no gradient"),
    pytest.param("e = torch.exp(s - s.max())\nw = e / e.sum()", id="softmax with the maximum subtracted"),
    pytest.param("w = torch.exp(-0.5 * (x / s) ** 2)\nk = w / w.sum()", id="a Gaussian kernel"),
    pytest.param("m = torch.ones(T, T).tril() & keep\nw = s.masked_fill(~m, -math.inf).softmax(-1)", id="causal"),
    pytest.param("w = s.masked_fill(~keep, -math.inf).softmax(-1)\nw = torch.nan_to_num(w)", id="empty rows repaired"),
    pytest.param("low = torch.finfo(s.dtype).min\nw = s.masked_fill(~keep, low).softmax(-1)", id="the dtype's minimum"),
    pytest.param("loss = F.cross_entropy(z, y, ignore_index=-100)", id="an ignored index that nothing sets here"),
    pytest.param("loss = x[:, 0].mean()", id="a column is not a selection"),
    pytest.param("accuracy = hits[mask].float().mean()", id="a metric"),
    pytest.param("kept = losses[mask]\nn = len(kept)\nif n >= 1:\n    loss = kept.mean()", id="counted by len"),
    pytest.param(
        "kept = losses[mask]\nn = int(mask.sum().item())\nif n > 0:\n    loss = kept.sum() / mask.sum()",
        id="counted by sum",
    ),
    pytest.param("kept = losses[mask]\nn = kept.shape[0]\nif n > 0:\n    loss = kept.mean()", id="counted by shape"),
    pytest.param("if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()", id="rank 0 first"),
    pytest.param("if rank in members:\n    dist.all_reduce(x, group=g)", id="a group's own collective"),
    pytest.param("model = DDP(net)\nstate = model.module.state_dict()", id="the inner module's state"),
    pytest.param(
        "def hook(state, bucket):\n    half = (bucket.buffer() / dist.get_world_size()).to(torch.float16)\n"
        "    return dist.all_reduce(half)",
        id="float16 divided before the cast",
    ),
    pytest.param("m = net.half()\nopt.step()", id="float16 that is not trained"),
    pytest.param(
        "for p in m.parameters():\n    dist.all_reduce(p.grad, group=tensor_parallel)", id="a sum within a group"
    ),
]

SEEN = [
    pytest.param("s = x.std()\ny = (x - x.mean()) / s", "division_by_std", id="through a name"),
    pytest.param("y = (x - x.mean()).div(x.std())", "division_by_std", id="div as a method"),
    pytest.param("x /= torch.std(x, dim=0)", "division_by_std", id="an augmented assignment"),
    pytest.param("y = x / x.var(0, keepdim=True).sqrt()", "division_by_std", id="the root of a variance"),
    pytest.param("y = x / x.std(1)[:, None]", "division_by_std", id="through indexing"),
    pytest.param("y = x / (x + 1e-6).std()", "division_by_std", id="an epsilon in the wrong place"),
    pytest.param("n = (labels != -100).float().sum()\nloss = t / n", "division_by_mask_sum", id="a comparison as mask"),
    pytest.param("lp = p.log()\nh = -(p * lp).sum()", "p_log_p", id="the log named first"),
    pytest.param("d = (a - b).pow(2).sum(1) ** 0.5", "sqrt_without_eps", id="a power of one half"),
    pytest.param("r = x.pow(2).mean(-1, keepdim=True).rsqrt()", "sqrt_without_eps", id="a reciprocal root"),
    pytest.param("y = torch.log1p(torch.exp(x))", "log_of_exp", id="softplus"),
    pytest.param(
        "w = F.softmax(s.masked_fill(~keep, -torch.inf), -1)", "masked_fill_neg_inf_then_softmax", id="nested"
    ),
    pytest.param("loss = F.binary_cross_entropy(z.sigmoid(), y)", "sigmoid_bce", id="functional, no autocast"),
    pytest.param("loss = losses[mask].mean()", "mean_over_possibly_empty", id="a mean of what a mask selects"),
    pytest.param(
        "kept = losses[mask]\nif kept.is_floating_point():\n    loss = kept.mean()",
        "mean_over_possibly_empty",
        id="a test of the dtype",
    ),
    pytest.param(
        "d = a - b\nif not torch.is_complex(d):\n    r = d.square().sum(-1).sqrt()",
        "sqrt_without_eps",
        id="a test of the kind",
    ),
    pytest.param(
        "if is_main_process():\n    dist.broadcast(x, 0)", "collective_under_rank_condition", id="by function"
    ),
]


@pytest.mark.parametrize("code", GUARDED)
def test_guarded_code_is_not_reported(code: str) -> None:
    """Code that is safe as written, or that a rule cannot judge, gives no finding."""
    assert lint_text(IMPORTS + code + "\n", "a.py") == []


@pytest.mark.parametrize(("code", "rule"), SEEN)
def test_fault_is_seen_however_it_is_written(code: str, rule: str) -> None:
    """The same fault is found behind names, reshapes and the other spellings of an operation."""
    assert [finding.rule for finding in lint_text(IMPORTS + code + "\n", "a.py")] == [rule]


def test_no_sync_over_what_cannot_be_evaluated_is_not_reported() -> None:
    """A condition that depends on more than the counter and the accumulation count is left alone."""
    code = "for i in range(8):\n    with model.no_sync() if ready(i) else null():\n        f().backward()\n    opt.step()\n"
    assert lint_text(IMPORTS + code, "a.py") == []


def test_files_without_torch_are_left_alone() -> None:
    """A file that imports nothing of torch is not training code, whatever it divides."""
    assert lint_text("import numpy as np\ny = x / x.std()\n", "a.py") == []


ZERO_EPSILON = """
def normalise(x, eps={default}):
    return (x - x.mean()) / (x.std() + eps)

def train(eps):
    return normalise(batch(), eps)
"""


@pytest.mark.parametrize(
    "code",
    [ZERO_EPSILON.format(default="1e-6") + "train(eps=0.0)", ZERO_EPSILON.format(default=0).partition("def train")[0]],
)
def test_epsilon_that_callers_set_to_zero_protects_nothing(code: str) -> None:
    """An epsilon is followed through the file's own calls and defaults; a literal 0 makes it no guard."""
    assert "division_by_std" in {finding.rule for finding in lint_text(IMPORTS + code, "a.py")}


def test_epsilon_that_nobody_sets_to_zero_is_a_guard() -> None:
    """Where calls give a positive epsilon, or the file has no call, the division is left alone."""
    for call in ("train(eps=1e-6)", "train(eps=options.eps)", ""):
        assert lint_text(IMPORTS + ZERO_EPSILON.format(default="1e-6") + call, "a.py") == []
