"""Real architectures, tiny and with random weights: captured, equal to the bit, no trace left."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from autockpt.capture import Capture, Key, check, clone_module, record, replay

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

Case = tuple[torch.nn.Module, dict[str, Any]]


def ids(rows: int, columns: int, vocabulary: int = 50) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, columns))


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=16,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    x = ids(2, 8)
    return transformers.GPT2LMHeadModel(config), {"input_ids": x, "labels": x}


def llama() -> Case:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    x = ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    return transformers.LlamaForCausalLM(config), {
        "input_ids": x, "labels": x, "attention_mask": mask,
    }  # fmt: skip


def bert() -> Case:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:] = 0
    batch = {"input_ids": ids(2, 8), "attention_mask": mask, "labels": ids(2, 8)}
    return transformers.BertForMaskedLM(config), batch


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": ids(2, 8), "labels": ids(2, 6),
    }  # fmt: skip


def vit() -> Case:
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64, num_labels=5, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 4]),
    }  # fmt: skip


def swin() -> Case:
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4, num_labels=5,
    )  # fmt: skip
    return transformers.SwinForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 4]),
    }  # fmt: skip


def resnet() -> Case:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([1, 4, 0, 2]),
    }  # fmt: skip


def convnext() -> Case:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, num_labels=5, drop_path_rate=0.1
    )
    return transformers.ConvNextForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([1, 4, 0, 2]),
    }  # fmt: skip


def whisper() -> Case:
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, num_mel_bins=8,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_source_positions=16, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.1,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 32), "labels": ids(2, 6),
    }  # fmt: skip


def unet() -> Case:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16,
        attention_head_dim=4,
    )  # fmt: skip
    return model, {
        "sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": torch.randn(2, 5, 16),
    }  # fmt: skip


MODELS: list[Callable[[], Case]] = [
    gpt2, llama, bert, t5, vit, swin, resnet, convnext, whisper, unet,
]  # fmt: skip


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {n: b.clone() for n, b in model.named_buffers()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_"):
                found[f"{name}!{key}"] = id(value) if isinstance(value, (dict, list)) else value
    return found


def assert_no_trace(model: torch.nn.Module, before: dict[str, Any]) -> None:
    after = state_of(model)
    assert list(after) == list(before)
    for name, value in before.items():
        same = torch.equal(value, after[name]) if torch.is_tensor(value) else value == after[name]
        assert same, name


def gradients(model: torch.nn.Module, scalar: torch.Tensor) -> list[torch.Tensor | None]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(scalar, parameters, allow_unused=True))


def assert_equal(left: Any, right: Any) -> None:
    assert (left is None) == (right is None)
    if left is not None:
        assert torch.equal(left, right)


def step_of_capture(
    capture: Capture, model: torch.nn.Module, args: Any, kwargs: Any
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    tensors = capture.inputs.tensors(args, kwargs)
    *outputs, scalar = replay(capture, model, tensors, loss=True)
    capture.outputs.build(outputs)
    return scalar, gradients(model, scalar)


def plain_loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    return loss if loss is not None else output[0].sum()


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_real_model(make: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    original, batch = make()
    original.train()
    # Settings that are made at the first call (config.problem_type), and then stay.
    plain_loss(original(**batch))
    model = clone_module(original)
    before, states = state_of(model), (torch.get_rng_state(), random.getstate())
    numpy_state = np.random.get_state()[1].tolist()
    capture, recorded = record(model, (), batch)
    assert_no_trace(model, before)
    assert torch.equal(states[0], torch.get_rng_state())
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == numpy_state
    assert capture.key.matches(model, (), batch)

    check(capture, model, (), batch)
    assert_no_trace(model, before)

    torch.manual_seed(1)
    output = original(**batch)
    expected = plain_loss(output)
    wanted = gradients(original, expected)
    after = torch.get_rng_state()
    buffers = {n: b.clone() for n, b in original.named_buffers()}
    for name, value in before.items():
        if torch.is_tensor(value):
            model.get_buffer(name).copy_(value)
    torch.manual_seed(1)
    scalar, got = step_of_capture(capture, model, (), batch)
    assert torch.equal(scalar, expected)
    assert torch.equal(after, torch.get_rng_state())
    for one, other in zip(wanted, got, strict=True):
        assert_equal(one, other)
    for name, value in buffers.items():
        assert torch.equal(value, model.get_buffer(name)), name
    assert len(recorded.outputs) == capture.outputs.count


def test_key_is_fast_enough_to_look_up_at_every_call() -> None:
    model, batch = gpt2()
    key = Key.take(model, (), batch)
    assert key.matches(model, (), batch)
