"""Around a region's forward: what fails when its tensors are wanted again is explained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from autockpt.errors import RecomputationError

_HOOKS: Any = torch._C._autograd


class Explained:
    """Entered right after ``checkpoint`` has put its hooks in force.

    Parameters
    ----------
    region : str
        As it begins a sentence: ``Module h.3``.
    causes : str
        What usually makes such a region differ.
    left : callable, optional
        Called when the forward has ended.
    """

    __slots__ = ("_causes", "_left", "_region")

    def __init__(self, region: str, causes: str, left: Callable[[], None] | None = None) -> None:
        self._region = region
        self._causes = causes
        self._left = left

    def __enter__(self) -> None:
        pack, unpack = _HOOKS._top_saved_tensors_default_hooks(True)
        explained = functools.partial(_explained, self._region, self._causes, unpack)
        _HOOKS._push_saved_tensors_default_hooks(pack, explained)

    def __exit__(self, *_: object) -> None:
        _HOOKS._pop_saved_tensors_default_hooks()
        if self._left is not None:
            self._left()


def _explained(
    region: str, causes: str, unpack: Callable[[Any], torch.Tensor], holder: Any
) -> torch.Tensor:
    try:
        return unpack(holder)
    except torch_checkpoint.CheckpointError as error:
        found = str(error).partition("\nTip:")[0].removeprefix("torch.utils.checkpoint: ")
        raise differs(region, found.strip(), causes) from error
    except RecomputationError:
        raise
    except Exception as error:
        note_region(error, region)
        raise


def differs(region: str, how: str, causes: str) -> RecomputationError:
    """Make the error of a region whose recomputation is not its forward."""
    return RecomputationError(
        f"{region} did not compute in backward what it computed in forward. {how}\n{causes}"
    )


def note_region(error: BaseException, region: str) -> None:
    """Say in which region an error was raised."""
    error.add_note(f"Raised by {region.rstrip(',')}, which runs again in backward.")
