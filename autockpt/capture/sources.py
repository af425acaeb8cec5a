"""The user's line behind a torch call, and the module it belongs to."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from types import CodeType, FrameType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = os.path.dirname(os.path.dirname(_TORCH)) + os.sep


@functools.cache
def _is_user_code(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith(("<frozen", _TORCH, _HERE)):
        return False
    return not name.startswith(_STDLIB) or name.startswith(_SITE)


def source_line(skip: int = 1) -> str:
    """``file.py:line`` of the innermost frame outside torch, the library and the stdlib.

    Parameters
    ----------
    skip : int
        Frames to leave out, the caller's first.
    """
    frame: FrameType | None = sys._getframe(skip)
    while frame is not None:
        if _is_user_code(frame.f_code):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
