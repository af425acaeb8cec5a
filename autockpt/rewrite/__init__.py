"""Re-emits a captured forward as readable Python, one function a region."""

from autockpt.rewrite.program import Program, is_guard, rewrite

__all__ = ["Program", "is_guard", "rewrite"]
