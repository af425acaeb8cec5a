"""The class of a submodule as the user wrote it: one of ours made of it says which that is."""

from __future__ import annotations

from torch import nn

WHOLE = "_autockpt_whole"


def whole_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Give the class that the user wrote."""
    found: type[nn.Module] = cls.__dict__.get(WHOLE, cls)
    return found
