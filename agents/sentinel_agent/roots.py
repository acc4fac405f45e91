"""Finds the modules that a script calls to train: the outermost owners of an optimizer's parameters.

Owns the search only. It walks all objects of the process once, some tens of milliseconds, so it runs once for each optimizer.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable

import torch
from torch import nn


def find_roots(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """Outermost modules with a forward of their own that hold a parameter of ``optimizer``, in the order of its parameters.

    Empty if no module owns them, as with flat copies that a framework optimizes in their place.
    """
    return _roots_of([p for group in optimizer.param_groups for p in group["params"]])


def find_trained() -> list[nn.Module]:
    """The same for every parameter that has a gradient now: a loop may use neither a wrapper nor an optimizer."""
    owned = (vars(one).get("_parameters") for one in _all_modules())
    parameters = (p for own in owned if isinstance(own, dict) for p in own.values())
    return _roots_of([p for p in parameters if p is not None and p.grad is not None])


def _roots_of(parameters: list[torch.Tensor]) -> list[nn.Module]:
    modules = [one for one in _all_modules() if _children(one) is not None]
    owners = _owners(modules, parameters)
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in _children(module) or ():
            parents.setdefault(id(child), []).append(module)
    tops: dict[int, nn.Module] = {}
    concerned: set[int] = set()
    for owner in owners:
        tops.update((id(top), top) for top in _climb(owner, parents, concerned))
    roots: dict[int, nn.Module] = {}
    for top in tops.values():
        roots.update((id(root), root) for root in _callable(top, concerned))
    return list(roots.values())


def _all_modules() -> list[nn.Module]:
    """Every module of the process, with no list of all objects ever in our hands.

    Whoever holds a reference to a tuple that another thread is still filling breaks that thread's ``tuple(generator)`` (bpo-15108),
    and between two bytecodes of ours another thread may run. So one call of C code gives the objects' types alone, and the modules
    are those that refer to a module's type: in Python 3.9 and later each object of a class does.
    """
    types = list(map(type, itertools.chain.from_iterable(map(gc.get_objects, (None,)))))
    classes = [kind for kind in {id(kind): kind for kind in types}.values() if issubclass(kind, nn.Module)]
    return [one for one in gc.get_referrers(*classes) if issubclass(type(one), nn.Module)]


def _owners(modules: Iterable[nn.Module], parameters: list[torch.Tensor]) -> list[nn.Module]:
    order = {id(p): i for i, p in enumerate(parameters)}
    first: list[tuple[int, nn.Module]] = []
    for module in modules:
        own = vars(module).get("_parameters")
        places = [order[id(p)] for p in own.values() if id(p) in order] if isinstance(own, dict) else []
        if places:
            first.append((min(places), module))
    return [module for _, module in sorted(first, key=lambda placed: placed[0])]


def _climb(module: nn.Module, parents: dict[int, list[nn.Module]], seen: set[int]) -> Iterable[nn.Module]:
    """Ancestors without a parent, or ``module`` itself; ``seen`` collects all that were passed."""
    ahead = [module]
    while ahead:
        current = ahead.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        above = parents.get(id(current), [])
        if not above:
            yield current
        ahead += above


def _callable(module: nn.Module, concerned: set[int]) -> Iterable[nn.Module]:
    """``module``, or the concerned modules below it if it is a mere container, such as a ModuleDict of two networks."""
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):  # torch.compile sets its own
        yield module
        return
    for child in _children(module) or ():
        if id(child) in concerned:
            yield from _callable(child, concerned)


def _children(module: nn.Module) -> list[nn.Module] | None:
    """Direct children; None for a module that was never initialised or keeps them elsewhere (a scripted one)."""
    children = vars(module).get("_modules")
    return [child for child in children.values() if child is not None] if isinstance(children, dict) else None
