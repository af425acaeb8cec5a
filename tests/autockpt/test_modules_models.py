"""Module regions on real models: bits, budgets, and what the judge predicts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import autockpt
from autockpt import FallbackWarning
from tests import zoo
from tests.helpers import (
    Step,
    activation_peak_bytes,
    assert_same_bits,
    peak_above_start,
    recomputed_calls,
    run_case,
)
from tests.zoo import Case


def mixtral() -> Case:
    """Experts get as many tokens as the router sends them."""
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        attention_dropout=0.1,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).train()
    tokens = torch.randint(256, (4, 128))
    return Case(model, (), {"input_ids": tokens, "labels": tokens}, None)


def whisper() -> Case:
    """Layers of encoder and decoder are left out by draws, and a cache is handed through."""
    config = transformers.WhisperConfig(
        vocab_size=256,
        d_model=64,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=40,
        max_source_positions=200,
        max_target_positions=100,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        decoder_start_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).train()
    rng = torch.Generator().manual_seed(1)
    features = torch.randn(4, 40, 400, generator=rng)
    labels = torch.randint(3, 256, (4, 60), generator=rng)
    return Case(model, (), {"input_features": features, "labels": labels}, None)


def wav2vec2() -> Case:
    """Numpy masks spans of the features, and layers are left out by draws."""
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32, 32),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 2, 2),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.2,
        mask_time_prob=0.2,
        mask_time_length=4,
    )
    torch.manual_seed(0)
    model = transformers.Wav2Vec2ForCTC(config).train()
    rng = torch.Generator().manual_seed(1)
    values = torch.randn(2, 6000, generator=rng)
    labels = torch.randint(1, 32, (2, 10), generator=rng)
    return Case(model, (), {"input_values": values, "labels": labels}, None)


def _planned(case: Case, budget: str, **options: Any) -> Any:
    options = {"emit": "modules", "cost": "roofline", "loss": case.loss, **options}
    return autockpt.optimize(case.model, case.args, case.kwargs, memory_budget=budget, **options)


@pytest.mark.parametrize("build", [zoo.gpt2, zoo.resnet, zoo.t5, mixtral])
def test_bits_budget_and_prediction(build: Callable[[], Case]) -> None:
    case = build()
    ours = _planned(case, "50%")
    assert_same_bits(run_case(case), run_case(case, ours))
    assert recomputed_calls(case, ours)
    report = ours.autockpt.report
    for model, predicted in ((case.model, report.plain_peak_bytes), (ours, report.peak_bytes)):
        measured = activation_peak_bytes(model, *case[1:])
        activations = predicted - report.fixed_bytes
        assert abs(measured - activations) <= 0.005 * activations
        assert model is case.model or report.fixed_bytes + measured <= report.budget_bytes


@pytest.mark.parametrize("build", [whisper, wav2vec2])
def test_layers_that_are_left_out_by_draws(build: Callable[[], Case]) -> None:
    case = build()
    ours = _planned(case, "60%")

    def step(seed: int, model: nn.Module) -> Step:
        np.random.seed(seed)
        return run_case(case, model, seed=seed)

    steps = [(step(seed, case.model), step(seed, ours)) for seed in range(8)]
    assert len({float(plain.loss) for plain, _ in steps}) > 4
    for plain, found in steps:
        assert_same_bits(plain, found)
    assert ours.autockpt.report.recompute_cost > 0
    # By now a step with every layer has been seen and planned for.
    report = ours.autockpt.report
    for seed in range(4):
        torch.manual_seed(seed)
        np.random.seed(seed)
        peak = peak_above_start(lambda: ours(**case.kwargs).loss.backward())
        assert report.fixed_bytes + peak <= report.budget_bytes


def test_routing_hands_over_to_modules_in_training() -> None:
    case = mixtral()
    plain = copy.deepcopy(case.model)
    ours = autockpt.optimize(copy.deepcopy(case.model), memory_budget="60%", cost="roofline")

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for step in range(9):
            tokens = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = losses(ours)
    assert found == losses(plain)
    assert sum(w.category is FallbackWarning for w in caught) == 1
    assert ours.autockpt.over_modules
    assert ours.autockpt.report.recompute_cost > 0


@pytest.mark.parametrize("build", [zoo.gpt2, zoo.resnet])
def test_compiled(build: Callable[[], Case]) -> None:
    case = build()
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    case.model.config.attn_pdrop = 0.0
    ours = _planned(case, "50%")
    found, peaks = [], []
    for model in (case.model, ours):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        found.append(run_case(case, compiled))
        peaks.append(activation_peak_bytes(compiled, *case[1:]))
    for (name, one), other in zip(
        found[0].gradients.items(), found[1].gradients.values(), strict=True
    ):
        assert torch.equal(one, other), name
    for (name, one), other in zip(found[0].buffers.items(), found[1].buffers.values(), strict=True):
        assert torch.equal(one, other), name
    assert peaks[1] < 0.7 * peaks[0]
