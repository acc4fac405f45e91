"""The loader and forward taps: what they see, and that they change nothing about loaders and modules."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sentinel_agent import patching
from sentinel_agent.errors import Health
from sentinel_agent.taps import batches
from sentinel_agent.window import Entry, Window


class Recorder:
    """A window and the health of the agent around it, as the taps see them."""

    def __init__(self) -> None:
        self.window: Window | None = Window()
        self.health = Health(0, lambda _reason: None)

    def entries(self, source: str) -> list[Entry]:
        assert self.window is not None
        return [entry for entry in self.window.entries(0) if entry.source == source]

    @property
    def forwards(self) -> int:
        return len(self.entries("forward"))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Taps installed for one test, and torch as it was afterwards."""
    recorder = Recorder()
    batches.install_loader_tap(lambda: recorder.window, recorder.health.guarded)
    yield recorder
    batches.uninstall()
    patching.restore()
    assert recorder.health.faults == {}


def _dataset() -> TensorDataset:
    return TensorDataset(torch.randn(12, 4), torch.arange(12))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_carry_the_indices_of_their_samples(recorder: Recorder, workers: int) -> None:
    """With and without workers, shuffled, each batch is kept with the very indices that made it."""
    for _x, y in DataLoader(_dataset(), batch_size=4, shuffle=True, num_workers=workers):
        entry = recorder.entries("loader")[-1]
        assert entry.sample_indices == tuple(y.tolist())
        assert torch.equal(entry.captured.held[1].tensor, y)
    assert len(recorder.entries("loader")) == 3


class OneBroken(Dataset[int]):
    """Sample 5 cannot be loaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise ValueError("broken sample")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_indices_stay_right_after_a_batch_that_failed(recorder: Recorder, workers: int) -> None:
    """A script that goes on after a broken sample still gets the right indices for later batches."""
    iterator = iter(DataLoader(OneBroken(), batch_size=2, num_workers=workers))
    seen = []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except ValueError:
            continue
        seen.append((batch.tolist(), list(recorder.entries("loader")[-1].sample_indices or ())))
    assert seen == [([n, n + 1], [n, n + 1]) for n in (0, 2, 6)]


def test_persistent_workers_start_over_in_the_next_epoch(recorder: Recorder) -> None:
    """Leaving an epoch early with batches under way does not shift the indices of the next one."""
    loader = DataLoader(_dataset(), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
    for _epoch in range(2):
        for number, (_x, y) in enumerate(loader):
            assert recorder.entries("loader")[-1].sample_indices == tuple(y.tolist())
            if number == 1:
                break


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0))


def test_a_stream_has_batches_but_no_indices(recorder: Recorder) -> None:
    """Batches of an iterable dataset are kept, and no index is made up for them."""
    assert len(list(DataLoader(Stream(), batch_size=3))) == 2
    assert [entry.sample_indices for entry in recorder.entries("loader")] == [None, None]


def test_a_loader_without_batching_and_a_subclass_are_seen(recorder: Recorder) -> None:
    """batch_size=None gives single indices; a subclass of DataLoader is no exception."""

    class Own(DataLoader[Any]):
        pass

    list(Own(_dataset(), batch_size=None))
    assert [entry.sample_indices for entry in recorder.entries("loader")][:2] == [(0,), (1,)]


def test_a_loader_inside_a_dataset_is_not_seen(recorder: Recorder) -> None:
    """A dataset that itself reads from a loader contributes one batch, not two."""

    class Nested(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for (x,) in DataLoader(TensorDataset(torch.ones(2, 3))):
                yield x

    list(DataLoader(Nested(), batch_size=None))
    assert [entry.captured.held[0].tensor.shape for entry in recorder.entries("loader")] == [(1, 3), (1, 3)]


def test_what_a_loader_yields_is_unchanged(recorder: Recorder) -> None:
    """With the tap, the same seed gives the same batches and leaves the generators in the same state."""

    def epoch() -> list[torch.Tensor]:
        torch.manual_seed(5)
        loaded = [x for x, _ in DataLoader(TensorDataset(torch.arange(10.0), torch.arange(10)), 3, shuffle=True)]
        return [*loaded, torch.rand(2)]

    with_tap = epoch()
    recorder.window = None
    assert all(torch.equal(a, b) for a, b in zip(epoch(), with_tap, strict=True))


def test_the_loader_s_own_errors_pass_through(recorder: Recorder) -> None:
    """StopIteration and a dataset's exception reach the script as they are."""
    iterator = iter(DataLoader(_dataset(), batch_size=12))
    next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(ValueError, match="broken sample"):
        list(DataLoader(OneBroken(), batch_size=8))


def test_the_outermost_forward_is_kept_with_its_inputs(recorder: Recorder) -> None:
    """Only the outermost watched module counts, positional and keyword inputs alike."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model()

        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return self.inner(x) * scale

    root = Root()
    assert batches.watch_root(root)
    assert batches.watch_root(root.inner)
    assert not batches.watch_root(root)
    x = torch.randn(3, 4)
    root(x, scale=2.0)
    (entry,) = recorder.entries("forward")
    assert torch.equal(entry.captured.held[0].tensor, x)
    root.inner(x)
    assert recorder.forwards == 2


def test_evaluation_forwards_are_not_kept(recorder: Recorder) -> None:
    """A forward without gradients leaves no entry and calls no output callback."""
    outputs: list[Any] = []
    batches.on_output(lambda module, output: outputs.append(output))
    model = _model()
    batches.watch_root(model)
    with torch.no_grad():
        model(torch.randn(1, 4))
    assert recorder.forwards == 0
    assert outputs == []


def test_the_root_s_output_is_offered(recorder: Recorder) -> None:
    """Callbacks get the outermost module and its output, once for each forward."""
    seen: list[tuple[nn.Module, Any]] = []
    batches.on_output(lambda module, output: seen.append((module, output)))
    model = _model()
    batches.watch_root(model)
    out = model(torch.randn(2, 4))
    assert len(seen) == 1
    assert seen[0][0] is model
    assert seen[0][1] is out


def test_a_forward_that_raises_does_not_blind_the_tap(recorder: Recorder) -> None:
    """After an exception, an interrupt included, the next forward is the outermost again."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.error: BaseException | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.error is not None:
                raise self.error
            return x * 2

    model = Failing()
    batches.watch_root(model)
    for error in (ValueError("in forward"), KeyboardInterrupt()):
        model.error = error
        with pytest.raises(type(error)):
            model(torch.ones(1))
        model.error = None
        before = recorder.forwards
        model(torch.ones(1))
        assert recorder.forwards == before + 1


def test_threads_are_told_apart(recorder: Recorder) -> None:
    """A root that runs in another thread while one runs here is an outermost forward of its own."""

    class Waiting(nn.Module):
        def forward(self, other: Callable[[], None]) -> int:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(20)
            return 0

    outer, inner = Waiting(), _model()
    batches.watch_root(outer)
    batches.watch_root(inner)
    outer(lambda: inner(torch.ones(1, 4)))
    assert recorder.forwards == 2


def test_recomputation_in_backward_is_no_forward(recorder: Recorder) -> None:
    """A watched block that a checkpoint runs again during backward is not taken for a new micro-batch."""
    block = _model()
    batches.watch_root(block)
    x = torch.randn(2, 4, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert recorder.forwards == 1


def test_a_fault_of_the_window_never_reaches_training(recorder: Recorder) -> None:
    """Whatever the window or a callback raises is counted, and loader and model work on."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"planted in {name}")

    health = Health(0, lambda _reason: None)
    batches.install_loader_tap(lambda: Broken(), health.guarded)

    def failing(module: nn.Module, output: Any) -> None:
        raise RuntimeError("planted in a callback")

    batches.on_output(failing)
    model = _model()
    batches.watch_root(model)
    for x, _y in DataLoader(_dataset(), batch_size=12):
        assert model(x).shape == (12, 2)
    assert set(health.faults) == {"loader:RuntimeError", "forward:RuntimeError", "output:RuntimeError"}


def test_copies_and_pickles_of_a_watched_module_carry_no_hook(recorder: Recorder) -> None:
    """A deep copy kept for averaging is not captured; a model saved whole names nothing of this package."""
    model = _model()
    batches.watch_root(model)
    average = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"sentinel" not in buffer.getvalue()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (average, loaded, copy.copy(model)):
        other(torch.ones(1, 4))
    assert not average._forward_hooks
    assert not loaded._forward_pre_hooks
    assert not loaded._forward_pre_hooks_with_kwargs
    assert not loaded._forward_hooks_always_called
    assert recorder.forwards == 0
    model(torch.ones(1, 4))
    assert recorder.forwards == 1


def test_a_module_with_its_own_pickling_carries_only_a_hook_that_does_nothing(recorder: Recorder) -> None:
    """Where a class builds its own state (an LSTM), the copy's hook is a function of the standard library."""
    model = nn.LSTM(3, 3)
    batches.watch_root(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"sentinel" not in buffer.getvalue()
    buffer.seek(0)
    torch.load(buffer, weights_only=False)(torch.ones(1, 1, 3))
    copy.deepcopy(model)(torch.ones(1, 1, 3))
    assert recorder.forwards == 0


def test_the_user_s_own_hooks_are_copied(recorder: Recorder) -> None:
    """Taking our hooks out of a copy leaves everybody else's in."""
    model = _model()
    calls: list[int] = []
    model.register_forward_hook(_Count(calls))
    batches.watch_root(model)
    twin = copy.deepcopy(model)
    twin(torch.ones(1, 4))
    assert next(iter(twin._forward_hooks.values())).calls == [1]


class _Count:
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def __call__(self, *_args: Any) -> None:
        self.calls.append(1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
def test_a_watched_module_can_be_scripted_traced_and_exported(recorder: Recorder) -> None:
    """TorchScript, tracing and torch.export see the module without hooks, and it is watched again afterwards."""
    model = _model()
    batches.watch_root(model)
    x = torch.ones(2, 4)
    expected = model(x)
    assert torch.equal(torch.jit.script(model)(x), expected)
    assert torch.equal(torch.jit.trace(model, x)(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    before = recorder.forwards
    model(x)
    assert recorder.forwards == before + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_watched_module_compiles_whole_and_is_still_seen(recorder: Recorder, backend: str) -> None:
    """torch.compile with fullgraph finds no graph break in our hooks; the forward is caught around the compiled region."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = _model()
    batches.watch_root(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(2, 4)
    for _ in range(2):
        assert torch.allclose(compiled(x), model(x))
    assert recorder.forwards == 4
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_uninstall_and_restore_leave_torch_as_it_was() -> None:
    """After uninstall and restore, iterator, module and pickling are the original objects."""
    originals = (_BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index, nn.Module.__getstate__, torch.compile)
    window = Window()
    batches.install_loader_tap(lambda: window)
    batches.install_loader_tap(lambda: window)
    model = _model()
    batches.watch_root(model)
    batches.uninstall()
    next(iter(DataLoader(_dataset())))
    model(torch.ones(1, 4))
    assert window.entries(0) == ()
    assert not model._forward_hooks
    patching.restore()
    now = (_BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index, nn.Module.__getstate__, torch.compile)
    assert now == originals


def test_a_second_install_does_not_catch_twice(recorder: Recorder) -> None:
    """Installing again replaces the provider and patches nothing again."""
    batches.install_loader_tap(lambda: recorder.window, recorder.health.guarded)
    next(iter(DataLoader(_dataset())))
    assert len(recorder.entries("loader")) == 1
