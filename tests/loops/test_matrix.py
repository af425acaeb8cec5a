"""Zoo models through every form of a loop. ``benchmarks/loops.py`` runs all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests import zoo
from tests.loops.matrix import FORMS, Form, optimized, run

# Each form once, over models of different kinds: dropout, statistics, convolutions, attention.
EAGER = [
    (name, form)
    for name, form in zip(
        ("gpt2", "resnet", "vit", "unet"),
        [form for form in FORMS if form.backend is None],
        strict=True,
    )
]
COMPILED = [
    (name, form)
    for name, form in zip(
        ("vit", "gpt2", "resnet", "convnext"),
        [form for form in FORMS if form.backend is not None],
        strict=True,
    )
]
HALF = [("llama", Form(precision="bf16", parts=3)), ("convnext", Form(precision="bf16"))]


@pytest.mark.parametrize(("name", "form"), [*EAGER, *COMPILED, *HALF], ids=str)
def test_equal_to_the_bit(name: str, form: Form) -> None:
    case = zoo.ZOO[name]()
    made: list[Any] = []
    expected = run(case, form)
    found = run(case, form, optimized(case, form, "60%", made, solver="interval_dp"))
    assert made[0].autockpt.plan.regions
    assert expected.same_bits(found)
