"""The wire tap sees every c10d reduction, whoever issues it, and changes none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_before
from torch.nn.parallel import DistributedDataParallel

from sentinel_agent.taps import wire


@dataclass
class Spy:
    """Keeps the calls it is shown."""

    calls: list[wire.Call] = field(default_factory=list)
    reduce_ops: list[str] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    interested: bool = True
    during: Callable[[], Any] = lambda: None

    def before(self, read: wire.Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the call."""
        call = read(args, kwargs)
        self.calls.append(call)
        self.reduce_ops.append(call.reduce_op)
        self.during()
        return len(self.calls) if self.interested else None

    def after(self, token: Any, result: Any) -> None:
        """Keep the work."""
        assert token == len(self.calls)
        self.works.append(wire.work_of(result))

    @property
    def ops(self) -> list[str]:
        """Names of the ops seen."""
        return [call.op for call in self.calls]


@pytest.fixture
def spy(group: None) -> Iterator[Spy]:
    """A listener in place of an agent."""
    spy = Spy()
    wire.install(spy)
    yield spy
    wire.uninstall()


def _scattered(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows), torch.arange(float(rows))


def _reduce_scatter_list() -> None:
    output, given = _scattered()
    dist.reduce_scatter(output, [given])
    assert torch.equal(output, given)


def _reduce_scatter_single() -> None:
    output, given = _scattered()
    dist.reduce_scatter_single(output, given)
    assert torch.equal(output, given)


def _inference() -> None:
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))


def _other_thread() -> None:
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2)))
    thread.start()
    thread.join()


def _group_method() -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    dist.group.WORLD.allreduce([torch.ones(2)], options).wait()  # type: ignore[union-attr]


CALLERS = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(2)), "allreduce_"),
    "name imported before": (lambda: imported_before(torch.ones(2)), "allreduce_"),
    "async": (lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(), "allreduce_"),
    "method of the group": (_group_method, "allreduce_"),
    "reduce": (lambda: dist.reduce(torch.ones(2), 0), "reduce_"),
    "reduce_scatter": (_reduce_scatter_list, "reduce_scatter_"),
    "reduce_scatter_single": (_reduce_scatter_single, "_reduce_scatter_base_"),
    "functional": (lambda: functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).wait(), None),
    "functional scatter": (
        lambda: functional.reduce_scatter_single(torch.ones(2), "sum", 0, dist.group.WORLD).wait(),
        None,
    ),
    "inference mode": (_inference, "allreduce_"),
    "another thread": (_other_thread, "allreduce_"),
}


@pytest.mark.parametrize("caller", CALLERS, ids=lambda name: name.replace(" ", "_"))
def test_every_caller_is_seen_once(spy: Spy, caller: str) -> None:
    """Whichever way a reduction is issued, the listener is called once before it and once when it is on its way."""
    call, op = CALLERS[caller]
    call()
    assert len(spy.calls) == len(spy.works) == 1
    assert op is None or spy.ops == [op]
    assert [t.tolist() for t in spy.calls[0].inputs] in ([[1.0, 1.0]], [[0.0, 1.0]])


def test_the_reducer_of_ddp_is_seen(spy: Spy) -> None:
    """DDP's reducer is C++ and no Python name of torch's is involved; its buckets come by all the same."""
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    spy.calls.clear()
    model(torch.ones(1, 3)).sum().backward()
    assert spy.ops == ["allreduce_"]
    assert spy.calls[0].inputs[0].numel() == 3 * 2 + 2


def test_a_compiled_collective_is_seen(spy: Spy) -> None:
    """A collective in a compiled region reaches the same kernel, and the region stays compiled."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    for _ in range(3):
        assert step(torch.ones(2)).tolist() == [3.0, 3.0]
    assert len(spy.calls) == 3


@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_the_reduce_op_has_its_name(spy: Spy, name: str) -> None:
    """The op of the call is read from the boxed enum."""
    dist.all_reduce(torch.ones(2), getattr(dist.ReduceOp, name))
    assert spy.reduce_ops == [name]


def test_it_is_known_whether_the_caller_waits(spy: Spy) -> None:
    """A synchronous call says so, an asynchronous one too."""
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    assert [call.waits for call in spy.calls] == [True, False]


def test_inputs_and_outputs_are_told_apart(spy: Spy) -> None:
    """An all-reduce writes what it reads; a reduce-scatter reads one tensor and writes another."""
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    output, given = _scattered()
    dist.reduce_scatter(output, [given])
    assert spy.calls[0].inputs[0] is spy.calls[0].outputs[0]
    assert spy.calls[0].inputs[0].data_ptr() == tensor.data_ptr()
    assert spy.calls[1].inputs[0].data_ptr() == given.data_ptr()
    assert spy.calls[1].outputs[0].data_ptr() == output.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([1, 2]), torch.empty(0), torch.tensor([1 + 2j]), torch.ones(3, dtype=torch.float16)],
    ids=["integers", "empty", "complex", "float16"],
)
def test_any_dtype_passes(spy: Spy, tensor: torch.Tensor) -> None:
    """Tensors that nobody will check are passed on as untouched as the others."""
    given = tensor.clone()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, given)
    assert len(spy.calls) == 1


def test_other_collectives_are_left_alone(spy: Spy) -> None:
    """A barrier moves nothing, and gathering to one rank brings nothing into anybody's forward."""
    dist.gather(torch.ones(2), [torch.zeros(2)], 0)
    dist.barrier()
    assert spy.ops == []


MOVES = {
    "broadcast_": lambda given: dist.broadcast(given, 0),
    "_allgather_base_": lambda given: dist.all_gather_single(torch.zeros(2), given),
    "alltoall_base_": lambda given: dist.all_to_all_single(torch.zeros(2), given),
    "scatter_": lambda given: dist.scatter(torch.zeros(2), [given], 0),
}


@pytest.mark.parametrize("op", MOVES)
def test_what_moves_values_is_shown_with_what_was_given(spy: Spy, op: str) -> None:
    """By the names that c10d's schemas give: nonfinite values travel so, too."""
    given = torch.tensor([1.0, 2.0])
    MOVES[op](given)
    (call,) = spy.calls
    assert call.op == op
    assert [tensor.data_ptr() for tensor in call.inputs] == [given.data_ptr()]


def test_gathering_a_list_is_shown_with_what_was_given(spy: Spy) -> None:
    """Nonfinite values travel through it from rank to rank."""
    given = torch.ones(2)
    dist.all_gather([torch.zeros(2)], given)
    assert spy.ops == ["allgather_"]


def test_a_collective_of_the_listener_s_own_is_not_shown_to_it(spy: Spy) -> None:
    """What is issued inside the listener passes without a second look: there is no recursion."""
    inner = torch.ones(1)
    spy.during = lambda: dist.all_reduce(inner)
    dist.all_reduce(torch.ones(2))
    assert len(spy.calls) == 1


def test_no_interest_means_no_second_call(spy: Spy) -> None:
    """A listener that returns None is not told that the collective is on its way."""
    spy.interested = False
    dist.all_reduce(torch.ones(2))
    assert (len(spy.calls), len(spy.works)) == (1, 0)


def test_an_error_of_the_collective_is_the_user_s(spy: Spy) -> None:
    """What torch refuses, it refuses in its own words, and the next collective is seen again."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as refused:
        dist.reduce_scatter(torch.zeros(2), [torch.zeros(2), torch.zeros(5)])
    wire.uninstall()
    with pytest.raises(type(refused.value)) as plain:
        dist.reduce_scatter(torch.zeros(2), [torch.zeros(2), torch.zeros(5)])
    assert str(plain.value).splitlines()[0] == str(refused.value).splitlines()[0]
    wire.install(spy)
    spy.calls.clear()
    dist.all_reduce(torch.ones(2))
    assert len(spy.calls) == 1


def test_uninstalled_the_kernels_pass_calls_through(spy: Spy) -> None:
    """After uninstall nothing is shown to anybody and collectives work; install brings it back without new kernels."""
    library = wire._library
    wire.uninstall()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert spy.ops == []
    wire.install(spy)
    dist.all_reduce(tensor)
    assert spy.ops == ["allreduce_"]
    assert wire._library is library


def test_a_group_is_named_with_its_ranks(spy: Spy) -> None:
    """A group that is the whole world has a name and no list of ranks; a second look gives the same."""
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), group=dist.new_group([0], timeout=timedelta(seconds=10)))
    names = [wire.group_of(call.group) for call in spy.calls]
    assert [ranks for _, ranks in names] == [(), ()]
    assert names[0][0] != names[1][0]
    assert wire.group_of(spy.calls[0].group) == names[0]
