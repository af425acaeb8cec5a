"""What the benchmark says of its rows: a promise that is broken is named."""

from __future__ import annotations

from benchmarks.answers import of_budgets, of_hand, of_least, of_torch


def said(answers, beginning):
    return next(row["answer"] for row in answers if row["what"].startswith(beginning))


def test_hand_placement_that_recomputes_less_is_named() -> None:
    row = {"hand": "layer", "FLOPs": 1.3, "share": 1.0, "planned FLOPs": 1.2}
    rows = [
        {**row, "model": "better", "planned share": 0.6},
        {**row, "model": "little", "planned share": 0.9},
        {**row, "model": "worse", "planned share": 1.1},
        {**row, "model": "none", "planned share": None, "planned FLOPs": None},
    ]
    answers = of_hand(rows)
    assert said(answers, "hand, layer: more recomputation") == "worse"
    assert said(answers, "hand, layer: no plan") == "none"
    assert said(answers, "hand, layer: at least a third less") == "1 of 4"


def test_budgets_are_summed_up_over_models() -> None:
    rows = [
        {"solver": "auto", "budget": "50%", "model": m, "FLOPs": f, "time": 1.1, "gap": g}
        for m, f, g in (("a", 1.0, 0.1), ("b", 1.1, 0.4), ("c", 1.2, None))
    ]
    answers = of_budgets(rows)
    assert said(answers, "50%: FLOPs") == 1.1
    assert said(answers, "50%: gap above a quarter") == "b"


def test_a_peak_that_is_no_lower_and_more_flops_than_torch_are_named() -> None:
    assert said(of_least([{"peak": 0.2, "least by hand": 0.1}]), "least peak") == "0 of 1"
    row = {"model": "m", "torch budget": 0.5, "peak": 0.5, "FLOPs": 1.0, "planned peak": 0.5}
    rows = [
        {**row, "planned FLOPs": 1.01, "time over torch": 0.9},
        {**row, "torch budget": 0.2, "planned FLOPs": 1.0, "time over torch": 1.1},
        {**row, "torch budget": 0.0, "peak": 1.1, "planned FLOPs": 2.0, "time over torch": 9.0},
    ]
    answers = of_torch(rows)
    assert said(answers, "torch: more FLOPs") == "m 0.5"
    assert said(answers, "torch: not less step time") == "m 0.2"
    assert said(answers, "torch: peaks reached") == 2
