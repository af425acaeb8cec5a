"""Bytes over the step: predicted instants, measured levels, and the picture of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import autockpt
from autockpt.reports.plotting import _aligned
from autockpt.reports.report import Report
from autockpt.step import Measurement
from tests.zoo import ZOO


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, Measurement]:
    case = ZOO["gpt2"]()
    model = autockpt.optimize(
        case.model, case.args, case.kwargs, memory_budget="40%", cost="roofline"
    )
    return model, autockpt.measure(model, case.args, case.kwargs)


def test_instants_say_where_they_are_and_reach_the_peak(
    planned: tuple[nn.Module, Measurement],
) -> None:
    report = planned[0].autockpt.report
    timeline = report.timeline
    assert timeline.peak.nbytes == report.peak_bytes
    assert timeline.peak.module in report.peak_op or timeline.peak.source in report.peak_op
    assert {instant.phase for instant in timeline.instants} == {"forward", "recompute", "backward"}
    assert all(instant.source for instant in timeline.instants)
    assert all(i.region is not None for i in timeline.instants if i.phase == "recompute")
    assert {number for number, *_ in timeline.regions()} == set(
        range(len(planned[0].autockpt.plan.regions))
    )
    assert json.loads(json.dumps(timeline.to_dicts()))[0]["phase"] == "forward"
    assert "timeline" not in report.to_dict()


def test_measured_levels_reach_the_measured_peak(planned: tuple[nn.Module, Measurement]) -> None:
    measured = planned[1]
    levels = (*measured.forward_levels, *measured.backward_levels)
    assert max(levels) == measured.peak_bytes
    assert min(levels) >= measured.fixed_bytes


def test_the_picture_has_budget_regions_peak_and_both_lines(
    planned: tuple[nn.Module, Measurement], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    model, measured = planned
    path = tmp_path / "step.png"
    figure = model.autockpt.report.plot(path, measured=measured)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert {"predicted", "measured", "fixed bytes"} < labels
    assert any(label.startswith("budget") for label in labels)
    assert any(text.get_text().startswith("peak") for text in axes.texts)
    shaded = sum(1 for _ in model.autockpt.report.timeline.regions())
    assert sum(1 for patch in axes.patches) == shaded


def test_levels_are_paired_in_order_and_drawn_as_they_are() -> None:
    places, levels = _aligned(np.array([1.0, 2, 9, 8, 2]), np.array([1.0, 9, 2, 2]))
    assert places.tolist() == [0, 0, 1, 1, 2, 3]
    assert levels.tolist() == [1, 2, 9, 8, 2, 2]


def test_without_matplotlib_it_says_what_to_install(
    planned: tuple[nn.Module, Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"autockpt\[plots\]"):
        planned[0].autockpt.report.plot()


def test_nothing_planned_is_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="Nothing was planned yet"):
        Report().plot()


def test_old_garbage_does_not_move_what_is_measured() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.ones(512, 64)
    expected = autockpt.measure(model, (x,)).peak_bytes
    for _ in range(50):
        cycle: list[object] = [torch.zeros(1 << 14)]
        cycle.append(cycle)
    assert autockpt.measure(model, (x,)).peak_bytes == expected
