"""Re-emits a captured forward as readable Python, one function a region."""

from autockpt.rewrite.program import Program, rewrite

__all__ = ["Program", "rewrite"]
