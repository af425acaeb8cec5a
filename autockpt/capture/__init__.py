"""From a model and one batch to the graph of what really ran, checked and keyed."""

from autockpt.capture.ambient import Ambient
from autockpt.capture.captured import Capture, TensorMeta
from autockpt.capture.check import check
from autockpt.capture.clone import clone_module
from autockpt.capture.guards import GuardMiss, expect
from autockpt.capture.key import Key
from autockpt.capture.paths import Path, read_path
from autockpt.capture.recorder import Recorded, record
from autockpt.capture.replay import replay
from autockpt.capture.restore import untraced
from autockpt.capture.tree import Inputs, Template

__all__ = [
    "Ambient",
    "Capture",
    "GuardMiss",
    "Inputs",
    "Key",
    "Path",
    "Recorded",
    "Template",
    "TensorMeta",
    "check",
    "clone_module",
    "expect",
    "read_path",
    "record",
    "replay",
    "untraced",
]
