"""What is refused before anything runs, and the hooks that throw saved tensors away."""

from __future__ import annotations

import torch

from autockpt.capture.clone import refuse_compiled
from autockpt.errors import CaptureError


def refuse_modules(model: torch.nn.Module) -> None:
    """Raise for modules whose calls cannot be seen, or that are not ready to run."""
    for name, module in model.named_modules():
        # Of an optimized root: what is compiled then goes around its planned forward.
        if name or not hasattr(type(module), "_autockpt_original"):
            refuse_compiled(name, module)
        if any(map(torch.nn.parameter.is_lazy, module._parameters.values())):
            raise CaptureError(
                f"Module '{name}' ({type(module).__name__}) is lazy: its parameters have no "
                "shape yet. Run one forward of the model first."
            )
        # The root's run around the forward, which is all that is replaced.
        if name and module._backward_hooks and not module._is_full_backward_hook:
            raise CaptureError(
                f"Module '{name}' ({type(module).__name__}) has a backward hook of the old kind "
                "(register_backward_hook), which hangs on whatever op comes last. Use "
                "register_full_backward_hook."
            )


def refuse_modes() -> None:
    """Raise if a function mode of the user's is in force: recomputation would run without it."""
    for mode in torch.overrides._get_current_function_mode_stack():
        if not isinstance(mode, torch.utils._device.DeviceContext):
            raise CaptureError(
                f"A TorchFunctionMode ({type(mode).__name__}) is active around the forward. It "
                "would not be when a region is run again in backward. Enter it inside the "
                "model's forward instead."
            )


def drop(tensor: torch.Tensor) -> None:
    """Pack hook that throws a saved tensor away."""


def gone(_: None) -> torch.Tensor:
    """Unpack hook of what was thrown away."""
    raise RuntimeError("saved tensors are thrown away while a forward is recorded or checked")
