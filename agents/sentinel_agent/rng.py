"""The random number generators of this process: take their states cheaply, name them as tensors, set them back.

Owns torch's CPU and current CUDA generator, Python's ``random`` and numpy's global generator. Generators that a script makes
for itself are not seen.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MT_WORDS = 624
_MT_BYTES = 4 * _MT_WORDS + 4  # its words, and the position among them


@dataclass(frozen=True, slots=True)
class RngState:
    """States at one moment; None where the generator is not in use in this process."""

    torch_cpu: Tensor
    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    cuda: Tensor | None


def snapshot() -> RngState:
    """States of all generators now: 2 us, 7 more if Python's was drawn from since, 25 to 30 if numpy's was."""
    return RngState(torch.default_generator.get_state(), _python.take(), _numpy.take(), _cuda_state())


def as_tensors(state: RngState) -> dict[str, Tensor]:
    """The states as named tensors, which is how a bundle keeps them (``from_tensors`` is the inverse)."""
    _version, words, gauss = state.python
    tensors = {"torch": state.torch_cpu, "python": torch.tensor(words, dtype=torch.int64)}
    if gauss is not None:
        tensors["python_gauss"] = torch.tensor([gauss], dtype=torch.float64)
    if state.cuda is not None:
        tensors["cuda"] = state.cuda
    if state.numpy is not None:
        words = [*state.numpy["state"]["key"].tolist(), state.numpy["state"]["pos"]]
        tensors["numpy"] = torch.tensor(words, dtype=torch.int64)
        gauss = [float(state.numpy["has_gauss"]), state.numpy["gauss"]]
        tensors["numpy_gauss"] = torch.tensor(gauss, dtype=torch.float64)
    return tensors


def from_tensors(tensors: Mapping[str, Tensor]) -> RngState:
    """Inverse of ``as_tensors``. Raises KeyError if torch's or Python's state is missing."""
    gauss = tensors.get("python_gauss")
    python = (3, tuple(tensors["python"].tolist()), None if gauss is None else gauss.item())
    return RngState(tensors["torch"].clone(), python, _numpy_from(tensors), tensors.get("cuda"))


def restore(state: RngState) -> None:
    """Set every generator that ``state`` holds."""
    torch.default_generator.set_state(state.torch_cpu)
    random.setstate(state.python)
    if state.numpy is not None:
        import numpy.random

        numpy.random.set_state(state.numpy)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda)


def _numpy_from(tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    if "numpy" not in tensors:
        return None
    import numpy

    *key, pos = tensors["numpy"].tolist()
    has_gauss, gauss = tensors["numpy_gauss"].tolist()
    inner = {"key": numpy.array(key, dtype=numpy.uint32), "pos": pos}
    return {"bit_generator": "MT19937", "state": inner, "has_gauss": int(has_gauss), "gauss": gauss}


def _cuda_state() -> Tensor | None:
    # Reading the generator is host work, but it is forbidden while a graph is being captured.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.get_rng_state()


class _PythonState:
    """Takes the state of ``random``, and gives the last one again while nothing has drawn from the generator.

    A full read makes 625 integers, each time the batch window looks; comparing the generator's memory makes none. Where the
    interpreter lays it out in another way than CPython, every look is a full read.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = random.getstate()
        self._memory = b""
        self._address = 0
        self._generator: Any = getattr(random, "_inst", None)
        if isinstance(self._generator, random.Random):
            self._watch()

    def take(self) -> tuple[Any, ...]:
        if not self._address:
            return random.getstate()
        memory = ctypes.string_at(self._address, _MT_BYTES)
        if memory != self._memory or self._generator.gauss_next != self._last[2]:
            self._memory, self._last = memory, random.getstate()
        return self._last

    def _watch(self) -> None:
        """Look at its memory from now on, if that is the position and the words, right behind an object's header."""
        _version, (*words, position), _gauss = self._last
        expected = b"".join(word.to_bytes(4, sys.byteorder) for word in (position, *words))
        if object.__basicsize__ + _MT_BYTES > random.Random.__basicsize__:
            return
        address = id(self._generator) + object.__basicsize__
        if sys.implementation.name == "cpython" and ctypes.string_at(address, _MT_BYTES) == expected:
            self._address = address


class _NumpyState:
    """Takes numpy's global state, and gives the last one again while nothing has drawn from the generator.

    A full read costs 24 us, a look at the generator's memory 0.4. The memory does not show the cached second normal
    deviate, so a state that holds one is never given again.
    """

    def __init__(self) -> None:
        self._address = 0
        self._of: object = None  # the bit generator that _address belongs to
        self._memory = b""
        self._last: dict[str, Any] | None = None

    def take(self) -> dict[str, Any] | None:
        module = sys.modules.get("numpy.random")
        if module is None:
            return None
        generator = module.get_bit_generator()
        if generator is not self._of:
            self._watch(generator)
        if not self._address:
            return self._read(module)
        memory = ctypes.string_at(self._address, _MT_BYTES)
        if memory != self._memory or self._last is None or self._last["has_gauss"]:
            self._memory, self._last = memory, self._read(module)
        return self._last

    def _read(self, module: Any) -> dict[str, Any] | None:
        state: dict[str, Any] = module.get_state(legacy=False)
        return state if state.get("bit_generator") == "MT19937" else None

    def _watch(self, generator: Any) -> None:
        """Look at this generator's memory from now on, if it is laid out as we believe."""
        self._of, self._address, self._last = generator, 0, None
        state = generator.state
        if state.get("bit_generator") != "MT19937":
            return
        address = generator.ctypes.state_address
        expected = state["state"]["key"].tobytes() + int(state["state"]["pos"]).to_bytes(4, sys.byteorder)
        if ctypes.string_at(address, len(expected)) == expected:
            self._address = address


_python = _PythonState()
_numpy = _NumpyState()
