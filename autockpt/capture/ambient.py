"""What surrounds a torch call: grad mode, autocast, defaults, attention backends.

The same call means something else under ``torch.no_grad()`` or ``torch.autocast``; every
recorded node remembers its surroundings, and the emitted forward puts them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

_SDPA_BACKENDS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """Autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Ambient:
    """The modes in force around a call.

    Attributes
    ----------
    grad, inference : bool
        Whether autograd records, and whether inference mode is on.
    autocast : tuple of Autocast
        One entry for each device type asked for, sorted by name.
    autocast_cache : bool
        Whether autocast caches the weights it casts.
    default_dtype, default_device : torch.dtype, torch.device
        What factory functions use when not told.
    sdpa : tuple of bool
        Attention backends that are allowed: flash, efficient, math, cudnn.
    reduces : bool
        Whether attention of half precision is composed in half precision.
    """

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    autocast_cache: bool
    default_dtype: torch.dtype
    default_device: torch.device
    sdpa: tuple[bool, bool, bool, bool]
    reduces: bool

    @classmethod
    def current(cls, device_types: Iterable[str] = ("cpu",)) -> Ambient:
        """Read the modes in force now.

        Parameters
        ----------
        device_types : iterable of str
            Device types whose autocast state matters.

        Examples
        --------
        >>> with torch.no_grad():
        ...     Ambient.current().grad
        False
        """
        cuda = torch.backends.cuda
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(_autocast_state(kind) for kind in sorted(set(device_types))),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_dtype=torch.get_default_dtype(),
            default_device=torch.get_default_device(),
            sdpa=(
                cuda.flash_sdp_enabled(),
                cuda.mem_efficient_sdp_enabled(),
                cuda.math_sdp_enabled(),
                cuda.cudnn_sdp_enabled(),
            ),
            reduces=bool(cuda.fp16_bf16_reduction_math_sdp_allowed()),
        )

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Put these modes in force for a ``with`` block."""
        kinds = [state.device_type for state in self.autocast]
        with ExitStack() as stack:
            now = Ambient.current(kinds)
            if now.default_device != self.default_device:
                stack.enter_context(self.default_device)
            if now.default_dtype != self.default_dtype:
                stack.enter_context(default_dtype(self.default_dtype))
            if now.sdpa != self.sdpa:
                stack.enter_context(torch.nn.attention.sdpa_kernel(self._sdpa_backends()))
            if now.autocast != self.autocast or now.autocast_cache != self.autocast_cache:
                for state in self.autocast:
                    stack.enter_context(_autocast_context(state, self.autocast_cache))
            if now.inference != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield

    def describe_difference(self, base: Ambient) -> list[str]:
        """Python source of the context managers that lead from `base` to these modes.

        Parameters
        ----------
        base : Ambient
            What is in force outside the block.

        Returns
        -------
        list of str
            Expressions for one ``with`` statement, outermost first; empty where nothing
            differs. The names in use are ``torch`` and ``default_dtype`` of this module.

        Examples
        --------
        >>> base = Ambient.current()
        >>> with torch.no_grad():
        ...     Ambient.current().describe_difference(base)
        ['torch.no_grad()']
        """
        parts: list[str] = []
        if self.default_device != base.default_device:
            parts.append(f"torch.device({str(self.default_device)!r})")
        if self.default_dtype != base.default_dtype:
            parts.append(f"default_dtype({self.default_dtype})")
        if self.sdpa != base.sdpa:
            names = (f"torch.nn.attention.SDPBackend.{b.name}" for b in self._sdpa_backends())
            parts.append(f"torch.nn.attention.sdpa_kernel([{', '.join(names)}])")
        parts += self._autocast_sources(base)
        if self.inference != base.inference:
            parts.append(f"torch.inference_mode({self.inference})")
        if self.grad != base.grad:
            parts.append("torch.enable_grad()" if self.grad else "torch.no_grad()")
        return parts

    def _autocast_sources(self, base: Ambient) -> list[str]:
        outside = {state.device_type: state for state in base.autocast}
        cache_differs = self.autocast_cache != base.autocast_cache
        parts = []
        for state in self.autocast:
            before = outside.get(state.device_type)
            if state == before and not (cache_differs and state.enabled):
                continue
            name = repr(state.device_type)
            if not state.enabled:
                parts.append(f"torch.autocast({name}, enabled=False)")
                continue
            cache = "" if self.autocast_cache else ", cache_enabled=False"
            parts.append(f"torch.autocast({name}, dtype={state.dtype}{cache})")
        return parts

    def _sdpa_backends(self) -> list[torch.nn.attention.SDPBackend]:
        allowed = zip(_SDPA_BACKENDS, self.sdpa, strict=True)
        return [getattr(torch.nn.attention.SDPBackend, name) for name, on in allowed if on]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype for a ``with`` block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast_state(kind: str) -> Autocast:
    # Some device types (meta) have no autocast at all: asking raises.
    if not torch.amp.is_autocast_available(kind):
        return Autocast(device_type=kind, enabled=False, dtype=torch.float32)
    return Autocast(
        device_type=kind,
        enabled=torch.is_autocast_enabled(kind),
        dtype=torch.get_autocast_dtype(kind),
    )


@contextmanager
def _autocast_context(state: Autocast, cache: bool) -> Iterator[None]:
    if not torch.amp.is_autocast_available(state.device_type):
        yield
        return
    # The dtype is part of the state even while autocast is off: `enabled=False` contexts
    # of the user set it too, and a later `enabled=True` block may read it.
    with torch.autocast(
        state.device_type, dtype=state.dtype, enabled=state.enabled, cache_enabled=cache
    ):
        yield
