"""stub"""
from __future__ import annotations
from typing import Any
class Key:
    @classmethod
    def take(cls, model: Any, args: Any, kwargs: Any) -> Key:
        return cls()
    def matches(self, model: Any, args: Any, kwargs: Any) -> bool:
        return True
