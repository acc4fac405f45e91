"""The tracer: blame follows what was computed from what."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sentinel.bundle.replayed import BadOp
from sentinel_agent.replay.places import ModuleStack
from sentinel_agent.replay.tracer import Tracer


@contextmanager
def traced() -> Iterator[Tracer]:
    """A tracer around the block."""
    tracer = Tracer(ModuleStack())
    with tracer:
        yield tracer


def blamed(tracer: Tracer, tensor: Tensor) -> BadOp:
    """The op that explains ``tensor`` best."""
    causes = tracer.blame(tensor)
    assert causes
    return causes[0].found


def test_the_op_that_makes_nan_from_finite_inputs_is_named() -> None:
    """0/0 is blamed on the division, with its operands, its row and this file's line; what spreads it is not."""
    x = torch.ones(4, 3)
    x[2] = 0.0
    with traced() as tracer:
        y = (x / x.sum(1, keepdim=True) * 2).exp().mean()
    op = blamed(tracer, y)
    assert (op.op, op.kind, op.phase) == ("aten.div.Tensor", "created", "forward")
    assert op.rows == (2,)
    assert [one.zeros for one in op.inputs] == [3, 1]
    assert op.line is not None
    assert op.line.startswith("test_tracer.py:")
    assert op.code is not None
    assert "x.sum(1" in op.code


def test_an_absorbed_mask_taints_nothing() -> None:
    """-inf of a mask that a softmax absorbs is nobody's fault: the result is finite and has no causes."""
    scores = torch.randn(3, 4)
    with traced() as tracer:
        weights = scores.masked_fill(torch.eye(3, 4, dtype=torch.bool), -math.inf).softmax(-1)
    assert tracer.blame(weights) == ()


def test_a_fully_masked_row_is_blamed_on_the_softmax() -> None:
    """NaN made of a mask's infinities is blamed where it is made, the mask being its parent."""
    scores = torch.randn(3, 4)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    with traced() as tracer:
        weights = scores.masked_fill(mask, -math.inf).softmax(-1)
    causes = tracer.blame(weights)
    assert causes[0].found.op == "aten._softmax.default"
    assert causes[0].found.kind == "escalated"
    assert causes[0].found.rows == (1,)
    assert [parent.found.kind for parent in causes[0].parents] == ["constant"]


def test_a_dead_branch_is_not_blamed() -> None:
    """A nonfinite value that torch.where leaves out does not explain another that it lets through."""
    x = torch.tensor([0.0, 1.0, -1.0])
    with traced() as tracer:
        dead = 1 / x
        kept = torch.where(x == 0, torch.zeros(()), dead)
        result = kept + x.sqrt().sum()
    op = blamed(tracer, result)
    assert op.op == "aten.sqrt.default"


def test_in_place_ops_show_the_inputs_they_destroy() -> None:
    """An in-place op's statistics are of its input before the op."""
    with traced() as tracer:
        x = torch.tensor([1.0, 0.0])
        x.log_()
    op = blamed(tracer, x)
    assert op.op == "aten.log_.default"
    assert op.inputs[0].zeros == 1
    assert op.inputs[0].neginf == 0


def test_a_finite_overwrite_clears_the_taint() -> None:
    """Once every element was written again, the old cause is forgotten; a later fault has its own."""
    with traced() as tracer:
        x = torch.zeros(3).log()
        x.copy_(torch.ones(3))
        y = x - 2
        z = y.sqrt()
    assert tracer.blame(y) == ()
    assert blamed(tracer, z).op == "aten.sqrt.default"


def test_views_share_their_base() -> None:
    """A row written through a view explains the whole, and the finite rest of the storage does not carry blame."""
    with traced() as tracer:
        x = torch.ones(4, 2)
        x[1].sub_(1).log_()
        bad, good = x.sum(), x[2:].sum()
    assert blamed(tracer, bad).op == "aten.log_.default"
    assert tracer.blame(good) == ()


def test_backward_ops_lead_to_the_forward_line_and_module() -> None:
    """sqrt at zero is finite forward and nonfinite backward: blamed on the backward op, at the forward's line."""
    modules = ModuleStack()
    tracer = Tracer(modules)
    weight = torch.zeros(3, requires_grad=True)
    layer = nn.Identity()
    modules.name(nn.Sequential(layer))
    with tracer:
        modules.enter(layer)
        loss = (weight**2).sqrt().sum()
        modules.leave()
        loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    op = blamed(tracer, weight.grad)
    assert op.phase == "backward"
    assert op.node is not None
    assert op.node.startswith("SqrtBackward")
    assert op.module == "0"
    assert op.code is not None
    assert ".sqrt()" in op.code


def test_what_arrives_nonfinite_is_named() -> None:
    """A tensor that was nonfinite before the step is blamed by the name it was given."""
    batch = torch.tensor([[1.0], [math.nan]])
    tracer = Tracer(ModuleStack())
    tracer.arrived(batch, "tensor 0 of the batch")
    with tracer:
        result = (batch * 2).sum()
    op = blamed(tracer, result)
    assert (op.kind, op.what, op.rows) == ("arrived", "tensor 0 of the batch", (1,))


def test_an_infinity_written_into_an_input_is_the_inputs_fault() -> None:
    """+inf that the script writes into what the model gets is blamed on that input, not on the layer that chokes on it."""
    with traced() as tracer:
        x = torch.ones(4, 3)
        x[3, 1] = math.inf
        tracer.entered(x, "forward input 0")
        result = functional.layer_norm(x, (3,)).sum()
    op = blamed(tracer, result)
    assert (op.kind, op.what, op.rows) == ("arrived", "forward input 0", (3,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_noticed(dtype: torch.dtype) -> None:
    """The tracer says whether a half precision was used, and can turn its casts into others."""
    with traced() as plain:
        torch.ones(2) * 2
    assert not plain.low_precision
    tracer = Tracer(ModuleStack(), recast=torch.float32)
    with tracer:
        cast = torch.ones(2).to(dtype)
    assert tracer.low_precision
    assert cast.dtype is torch.float32


def test_overflow_in_half_precision_names_the_range() -> None:
    """An overflow's operands show the values that did not fit."""
    x = torch.full((2, 2), 300.0, dtype=torch.float16)
    with traced() as tracer:
        y = x * x
    op = blamed(tracer, y)
    assert op.outputs[0].posinf == 4
    assert op.inputs[0].maximum == 300.0


def test_paused_ops_are_not_seen() -> None:
    """The replay's own tensor work leaves no trace."""
    with traced() as tracer:
        with tracer.pause():
            torch.zeros(2).log()
        seen = tracer.ops
    assert seen == 0
    assert tracer.events == []
