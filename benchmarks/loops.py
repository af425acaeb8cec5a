"""Every model of the zoo through every form of a training loop, beside the same loop without us.

    python -m benchmarks.loops [MODEL ...]

Forms: fp32 and bf16 autocast, one batch and accumulation of three, eager and compiled with
aot_eager. The bits of losses, parameters, gradients, buffers and random state after two optimizer
steps are compared: compiled ones with the compiled plain model, and where that takes another way
than the eager one (models ask whether they are traced), with the eager plain model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.common import show
from tests.loops.matrix import FORMS, Form, optimized, run
from tests.zoo import ZOO


def main() -> None:
    """Print a row for each model and form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=", ".join(ZOO))
    names = parser.parse_args().models or list(ZOO)
    rows = [row for name in names for row in cells(name)]
    show("Training loops, the same without us beside them", rows, "loops")
    kinds = sorted({row["equal to"] for row in rows})
    print(", ".join(f"{kind}: {sum(r['equal to'] == kind for r in rows)}" for kind in kinds))


def cells(name: str) -> Iterator[dict[str, Any]]:
    """Run the forms of one model."""
    for form in FORMS:
        case = ZOO[name]()
        made: list[Any] = []
        found = run(case, form, optimized(case, form, "60%", made, solver="interval_dp"))
        same = "differs"
        if run(case, form).same_bits(found):
            same = "plain"
        elif form.backend and run(case, _eager(form)).same_bits(found):
            same = "plain, eager"
        yield {
            "model": name,
            "form": str(form),
            "regions": len(made[0].autockpt.plan.regions),
            "equal to": same,
        }


def _eager(form: Form) -> Form:
    return Form(precision=form.precision, parts=form.parts)


if __name__ == "__main__":
    main()
