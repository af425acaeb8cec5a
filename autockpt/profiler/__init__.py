"""Profile: what each captured op keeps, allocates and costs."""

from autockpt.profiler.cost import CostChoice, OpWork, Roofline
from autockpt.profiler.facts import External, OpFacts, Profile
from autockpt.profiler.interpreter import device_of, fixed_bytes, profile, target_name

__all__ = [
    "CostChoice",
    "External",
    "OpFacts",
    "OpWork",
    "Profile",
    "Roofline",
    "device_of",
    "fixed_bytes",
    "profile",
    "target_name",
]
