"""The command line: what it prints, and how it exits."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from autockpt import demo
from autockpt.cli import app
from benchmarks import gpu_check

GOOD = demo.Row(
    model="toy",
    budget="50%",
    budget_bytes=2_000_000,
    plain_bytes=3_000_000,
    predicted_bytes=1_900_000,
    measured_bytes=1_950_000,
    fixed_bytes=950_000,
    time_ratio=1.25,
    flop_ratio=1.125,
    recompute_share=0.25,
    bound_share=0.2,
    regions=3,
    plan_seconds=0.5,
    differences=(),
)


def toy() -> demo.Example:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*layers)
    return demo.Example(
        name="toy", model=model, args=(torch.randn(2048, 64),), kwargs={}, loss=torch.mean
    )


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(*rows: demo.Row) -> Any:
        left = list(rows)
        monkeypatch.setattr(demo, "examples", lambda: {"toy": toy})
        monkeypatch.setattr(demo, "BUDGETS", tuple(row.budget for row in rows))
        monkeypatch.setattr(demo, "run", lambda example, budget: (left.pop(0), example.model))
        return CliRunner().invoke(app, ["demo"])

    return run


def test_all_is_well(invoke: Callable[..., Any]) -> None:
    result = invoke(GOOD, replace(GOOD, budget="30%"))
    assert result.exit_code == 0
    assert "toy" in result.output
    assert "1.86" in result.output
    assert "1.25x" in result.output
    assert "20.0%" in result.output
    assert "every bit is equal" in result.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"measured_bytes": 2_000_001}, "1 B over the budget"),
        ({"differences": ("loss", "buffer mean")}, "not equal to the bit: loss, buffer mean"),
    ],
)
def test_one_bad_row_fails(invoke: Callable[..., Any], change: dict[str, Any], words: str) -> None:
    result = invoke(replace(GOOD, **change), GOOD)
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())
    assert "every bit is equal" not in result.output


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "diffusers":
            raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "diffusers is not installed" in " ".join(result.output.split())
    assert "pip install 'autockpt[demo]'" in " ".join(result.output.split())


def test_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autockpt", "--help"], capture_output=True, text=True, check=True
    )
    assert "demo" in done.stdout


def test_a_real_cell() -> None:
    row, optimized = demo.run(toy(), "40%")
    assert row.ok, row.reason
    assert row.reason == ""
    assert row.regions > 0
    assert row.measured_bytes <= row.budget_bytes < row.plain_bytes
    assert abs(row.prediction_error) < 0.05
    assert row.flop_ratio >= 1.0
    assert isinstance(optimized, nn.Sequential)


def test_the_examples_are_what_they_say() -> None:
    makers = demo.examples()
    assert list(makers) == ["gpt2", "resnet", "unet"]
    for make in makers.values():
        example = make()
        assert example.model.training
        assert demo.count_flops(example, example.model) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_check_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_check(tmp_path: Any) -> None:
    assert gpu_check.main(["--output", str(tmp_path / "check.json")]) == 0
