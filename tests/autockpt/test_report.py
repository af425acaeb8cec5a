"""The report says what the judge says, and nothing it was not told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autockpt.reports.report import Report, make_report
from autockpt.units import Budget
from solvers.plan import Plan, Region
from solvers.problem import Gradient, Op, Problem, Storage, Value
from solvers.simulate import simulate

LAYERS = 4
WIDE = 4_096
STATE = 16
MODULES = ("norm", "up", "act", "down")


def chain() -> Problem:
    """Four layers of four ops each, then a loss; every op saves its input, ``act`` its output."""
    ops, values, storages = [], [Value(storage=0)], [Storage(nbytes=WIDE)]
    for index in range(LAYERS * len(MODULES) + 1):
        layer, kind = divmod(index, len(MODULES))
        is_loss = layer == LAYERS
        nbytes = 4 if is_loss else WIDE * (1 + kind)
        storages.append(Storage(nbytes=nbytes, producer=index))
        values.append(Value(storage=index + 1, gradient_bytes=nbytes))
        wants_gradient = index > 0
        ops.append(
            Op(
                name="loss" if is_loss else f"v{index}",
                module="" if is_loss else f"h.{layer}.{MODULES[kind]}",
                source=f"/home/user/model.py:{10 + kind}",
                inputs=(index,),
                outputs=(index + 1,),
                saved=(index + 1,) if kind == 2 else (index,),
                packs=True,
                gradient_bytes=(storages[index].nbytes,) if wants_gradient else (),
                gradients=(Gradient(value=index, source=0),) if wants_gradient else (),
                cost=1_000_000 * (1 + kind),
                stop_cost=1_000_000 * (1 + kind) if kind == 2 else 0,
                flops=100,
                stop_flops=100 if kind == 2 else 0,
                backward_flops=200,
                random=kind == 3 and not is_loss,
            )
        )
    return Problem(
        ops=tuple(ops),
        values=tuple(values),
        storages=tuple(storages),
        outputs=(len(ops),),
        loss=len(ops),
        boundaries=(True,) * (len(ops) + 1),
        batch_bytes=WIDE,
        random_state_bytes=STATE,
    )


def report_of(plan: Plan, *, problem: Problem | None = None, **fields: object) -> Report:
    problem = problem or chain()
    budget = Budget(peak_bytes=123_456, text="50%")
    return make_report(
        problem,
        plan,
        simulate(problem, plan),
        simulate(problem, Plan()),
        budget=budget,
        **fields,  # type: ignore[arg-type]
    )


LAYERWISE = Plan.flat([(4 * i, 4 * i + 4) for i in range(LAYERS)], solver="every_k")


def test_rows_add_up_to_the_judge() -> None:
    for plan in (LAYERWISE, Plan.flat([(1, 3), (6, 8), (9, 16)]), Plan()):
        report, prediction = report_of(plan), simulate(chain(), plan)
        assert sum(row.recompute_cost for row in report.regions) == prediction.recompute_cost
        assert sum(row.recompute_flops for row in report.regions) == prediction.recompute_flops
        assert report.recompute_share == prediction.recompute_share
        assert report.peak_bytes == prediction.peak_bytes
        plain = simulate(chain(), Plan())
        assert report.plain_peak_bytes == plain.peak_bytes
        freed = sum(row.freed_bytes for row in report.regions)
        assert freed == plain.kept_bytes - prediction.kept_bytes


def test_rows_say_where_and_what() -> None:
    (row, *_) = report_of(Plan.flat([(1, 4)])).regions
    assert (row.module, row.source, row.ops, row.random) == ("h.0", "model.py:11", 3, True)
    # Only `act`'s output is saved by ops inside and made there. The last op packs its input
    # only, so it is not run again.
    assert row.recompute_cost == 5_000_000
    assert row.freed_bytes == 3 * WIDE - STATE
    # `up`'s output is saved by nobody, but the input of a region is kept.
    (row, *_) = report_of(Plan.flat([(2, 4)])).regions
    assert row.freed_bytes == 3 * WIDE - 2 * WIDE - STATE
    (row, *_) = report_of(Plan.flat([(3, 5)])).regions
    assert row.module == "h.0-1"
    (row, *_) = report_of(Plan.flat([(15, 17)])).regions
    assert row.module == "h.3.down"


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        (("h.1.mlp", "h.1.mlp"), "h.1.mlp"),
        (("h.1.mlp.up", "h.1.mlp"), "h.1.mlp"),
        (("h.1.mlp", "h.1.attn"), "h.1"),
        (("h.1.mlp", "h.2.attn", "h.3.attn"), "h.1-3"),
        (("embed.tokens", "h.0.attn.q"), "embed.tokens .. h.0"),
        (("", "h.0"), "h.0"),
        (("", ""), "(top)"),
    ],
)
def test_a_region_is_named_after_what_it_covers(modules: tuple[str, ...], name: str) -> None:
    problem = chain()
    ops = [replace(op, module=module) for op, module in zip(problem.ops, modules, strict=False)]
    problem = replace(problem, ops=(*ops, *problem.ops[len(ops) :]))
    (row,) = report_of(Plan.flat([(0, len(modules))]), problem=problem).regions
    assert row.module == name


def test_nested_regions_are_rows_of_their_own() -> None:
    child = Region(start=1, stop=4)
    report = report_of(Plan(regions=(Region(start=0, stop=8, children=(child,)),)))
    assert [row.depth for row in report.regions] == [0, 1]
    assert report.regions[0].freed_bytes > report.regions[1].freed_bytes > 0
    assert "  h.0" in str(report)


def test_what_is_kept_and_made_again_before_is_shown_where_there_is_any() -> None:
    plain = str(report_of(LAYERWISE))
    assert "kept" not in plain
    assert "prologue" not in plain
    regions = (Region(start=0, stop=4, kept=(2,)), Region(start=6, stop=8, prologue=(4, 5)))
    report = report_of(Plan(regions=regions))
    assert [(row.ops, row.kept, row.prologue) for row in report.regions] == [(4, 1, 0), (2, 0, 2)]
    header = next(line for line in str(report).splitlines() if "runs again" in line)
    assert "kept" in header
    assert "prologue" in header


def test_text_groups_repeated_layers() -> None:
    text = str(report_of(LAYERWISE, notes=("Your own checkpoints were dissolved.",)))
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines)
    grouped = [line for line in lines if "h.{0-2}" in line or "h.{0-3}" in line]
    assert len(grouped) == 1
    assert "model.py:10" in grouped[0]
    assert "Your own checkpoints were dissolved." in text
    assert "120.56 KiB (asked: 50%)" in text
    assert "every_k, feasible" in text


def test_nothing_is_called_measured_before_it_was() -> None:
    report = report_of(LAYERWISE, bound_cost=1_000_000)
    assert "measured" not in str(report)
    assert "no schedule can do with less than" in str(report)
    assert "no schedule" not in str(report_of(LAYERWISE))
    measured = report.with_measured(plain_peak_bytes=None, peak_bytes=2_048)
    assert "2.00 KiB measured" in str(measured)
    assert str(measured).count("measured") == 1


def test_plain_data() -> None:
    report = report_of(LAYERWISE)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["regions"][0]["module"] == "h.0"
    assert data["recompute_share"] == report.recompute_share
    assert data["flop_ratio"] == report.flop_ratio > 1
    assert data["bound_share"] is None


def test_a_model_returned_as_it_is() -> None:
    text = str(Report(notes=("The model has no trainable parameter and is returned as it is.",)))
    assert text == "Note: The model has no trainable parameter and is returned as it is."
    assert str(Report()) == "Nothing was planned."


def test_another_cost_has_no_unit() -> None:
    assert " ms" not in str(report_of(LAYERWISE, cost="custom"))
    assert " ms" in str(report_of(LAYERWISE))


def test_the_peak_says_which_way_of_training_sets_it() -> None:
    """Fresh gradients can need more: one that cannot be stolen is copied."""
    ops = (
        Op(name="a", inputs=(0,), outputs=(1,), saved=(0,), packs=True, gradient_bytes=(64,),
           gradients=(Gradient(value=0, source=0, dense=False),)),
        Op(name="b", inputs=(1,), outputs=(2,), gradient_bytes=(8,),
           gradients=(Gradient(value=1, source=0),)),
    )  # fmt: skip
    values = (
        Value(storage=0, gradient_bytes=64, leaf=True, parameter=True),
        Value(storage=1, gradient_bytes=8),
        Value(storage=2, gradient_bytes=8),
    )
    storages = (Storage(nbytes=64), Storage(nbytes=8, producer=0), Storage(nbytes=8, producer=1))
    for gradient_bytes, word in ((64, "resident"), (0, "fresh")):
        problem = Problem(
            ops=ops, values=values, storages=storages, outputs=(), loss=2,
            boundaries=(True,) * 3, gradient_bytes=gradient_bytes,
        )  # fmt: skip
        prediction = simulate(problem, Plan())
        report = make_report(
            problem, Plan(), prediction, prediction, budget=Budget(peak_bytes=1000, text="1000")
        )
        assert f"gradients {word}" in report.peak_op
