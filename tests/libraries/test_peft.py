"""peft: a frozen base with adapters. What is frozen saves less, and the plan knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import autockpt
from tests import zoo
from tests.helpers import activation_peak_bytes, assert_same_bits, equal, run_step


def adapted(targets: list[str], dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, init_lora_weights=False)
    return get_peft_model(zoo.llama().model, config)


@pytest.mark.parametrize(
    ("targets", "dropout"),
    [(["q_proj", "v_proj"], 0.0), (["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"], 0.1)],
)
def test_adapters_train_alike(targets: list[str], dropout: float) -> None:
    kwargs = zoo.llama().kwargs
    plain = adapted(targets, dropout)
    ours: Any = autockpt.optimize(
        copy.deepcopy(plain),
        kwargs=kwargs,
        memory_budget="60%",
        cost="roofline",
        solver="interval_dp",
    )
    assert ours.autockpt.plan.regions
    assert [n for n, p in ours.named_parameters() if p.requires_grad] == [
        n for n, p in plain.named_parameters() if p.requires_grad
    ]
    for seed in (1, 2):
        steps = [run_step(model, kwargs=kwargs, seed=seed) for model in (plain, ours)]
        assert_same_bits(*steps)
    assert any(gradient is None for gradient in steps[0].gradients.values())


def test_what_is_frozen_saves_less_and_the_plan_knows() -> None:
    kwargs = zoo.llama().kwargs
    frozen, whole = adapted(["v_proj"]), adapted(["v_proj"])
    whole.requires_grad_(True)
    predicted = {}
    for name, model in (("frozen", frozen), ("whole", whole)):
        ours: Any = autockpt.optimize(
            model, kwargs=kwargs, memory_budget="50%", cost="roofline", solver="interval_dp"
        )
        report = ours.autockpt.report
        predicted[name] = report.plain_peak_bytes - report.fixed_bytes
        measured = activation_peak_bytes(ours, kwargs=kwargs)
        plain = activation_peak_bytes(model, kwargs=kwargs)
        assert abs(plain - predicted[name]) < 0.01 * plain
        assert measured <= report.budget_bytes - report.fixed_bytes
    assert predicted["frozen"] < 0.9 * predicted["whole"]


def test_adapters_added_to_an_optimized_model() -> None:
    case = zoo.llama()
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    models: list[Any] = []
    for model in (
        case.model,
        autockpt.optimize(
            copy.deepcopy(case.model), memory_budget="60%", cost="roofline", solver="interval_dp"
        ),
    ):
        torch.manual_seed(1)
        models.append(get_peft_model(model, config))
    assert_same_bits(*(run_step(model, kwargs=case.kwargs) for model in models))
    assert models[1].get_base_model().autockpt.plan.regions
    merged = [model.merge_and_unload() for model in models]
    for p, q in zip(*(m.parameters() for m in merged), strict=True):
        assert equal(p, q)
    assert_same_bits(*(run_step(trained(model), kwargs=case.kwargs) for model in merged))


def trained(model: nn.Module) -> nn.Module:
    return model.requires_grad_(True)


def test_saved_and_loaded_adapters(tmp_path: Any) -> None:
    kwargs = zoo.llama().kwargs
    ours: Any = autockpt.optimize(
        adapted(["q_proj"]), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    run_step(ours, kwargs=kwargs)
    ours.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
