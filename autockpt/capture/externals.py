"""The tensors that a graph reads from the live module: parameters, buffers, attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.capture.paths import format_steps, generators_within, is_apart, tensors_within

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """A tensor of the module: where it is, and ``parameter``, ``buffer`` or ``attribute``."""

    target: str
    kind: str


class Externals:
    """Finds out which attribute of the model a tensor is.

    Parameters
    ----------
    model : torch.nn.Module
        The root.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[int, External] = {}
        for kind, named in (
            ("parameter", model.named_parameters(remove_duplicate=True)),
            ("buffer", model.named_buffers(remove_duplicate=True)),
        ):
            for name, tensor in named:
                self._known.setdefault(id(tensor), External(target=name, kind=kind))
        # A model holds these tensors strongly, except that an attribute may be rebound while
        # the forward runs: keeping the object alive keeps its id its own.
        self._attributes: dict[int, torch.Tensor] = {}

    def get(self, tensor: torch.Tensor) -> External | None:
        """Return the attribute that `tensor` is, if it is known already."""
        return self._known.get(id(tensor))

    def current(self, tensor: torch.Tensor) -> External | None:
        """Look for a parameter that was put in another's place since."""
        for name, found in self._model.named_parameters():
            if found is tensor:
                return External(target=name, kind="parameter")
        return None

    def search(self, tensor: torch.Tensor) -> External | None:
        """Look for `tensor` in the plain attributes of all modules, containers included."""
        for target, found in attribute_tensors(self._model):
            if found is tensor:
                external = External(target=target, kind="attribute")
                self._known[id(tensor)] = external
                self._attributes[id(tensor)] = tensor
                return external
        return None


def attribute_generators(model: torch.nn.Module) -> Iterator[torch.Generator]:
    """Yield the generators in plain attributes of all modules, containers included."""
    for module in model.modules():
        yield from generators_within(_attributes(module))


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in _REGISTRIES and not is_apart(k)}


def attribute_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in plain attributes of all modules, containers included, by path."""
    for prefix, module in model.named_modules():
        for steps, tensor in tensors_within(_attributes(module), objects=True):
            (_, name), *rest = steps
            path = f"{prefix}.{name}" if prefix else str(name)
            yield path + format_steps(tuple(rest)), tensor
