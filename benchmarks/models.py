"""The ten models of the zoo in sizes where a step is work, not bookkeeping.

A plain step takes some tenths of a second to two seconds on one core, and activations are most of
its peak. Beside each, the classes of the layers that people put under ``checkpoint`` by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo import Case, CrossEntropy, Denoising, gpt2_design

Batch = dict[str, Any]


def _case(
    build: Callable[[], nn.Module],
    batch: Callable[[torch.Generator], Batch],
    loss: Callable[[torch.Generator], Callable[[Any], Tensor]] | None = None,
) -> Case:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = build().train()
    rng = torch.Generator().manual_seed(1)
    kwargs = batch(rng)
    return Case(model, kwargs.pop("args", ()), kwargs, loss(rng) if loss else None)


def _tokens(rng: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(1, vocabulary, shape, generator=rng)


def _mask(batch: int, length: int) -> Tensor:
    lengths = length - torch.arange(batch) * (length // 8)
    return (torch.arange(length)[None, :] < lengths[:, None]).long()


def llama() -> Case:
    """Six layers, width 256, grouped queries, 4 x 256 tokens."""
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
        pad_token_id=0,
    )

    def batch(rng: torch.Generator) -> Batch:
        tokens = _tokens(rng, 1000, 4, 256)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return _case(lambda: transformers.LlamaForCausalLM(config), batch)


def bert() -> Case:
    """Six layers, width 256, 4 x 256 padded tokens, dropout 0.1."""
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=256,
    )

    def batch(rng: torch.Generator) -> Batch:
        tokens, mask = _tokens(rng, 1000, 4, 256), _mask(4, 256)
        labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    return _case(lambda: transformers.BertForMaskedLM(config), batch)


def t5() -> Case:
    """Four layers of encoder and decoder, width 256, 4 x 192 and 4 x 128 tokens, dropout 0.1."""
    config = transformers.T5Config(
        vocab_size=1000,
        d_model=256,
        d_kv=64,
        d_ff=768,
        num_layers=4,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )

    def batch(rng: torch.Generator) -> Batch:
        source, target = _tokens(rng, 1000, 4, 192), _tokens(rng, 1000, 4, 128)
        return {"input_ids": source, "attention_mask": _mask(4, 192), "labels": target}

    return _case(lambda: transformers.T5ForConditionalGeneration(config), batch)


def vit() -> Case:
    """Eight layers, width 192, 6 images of 12 x 12 patches, dropout 0.1."""
    config = transformers.ViTConfig(
        image_size=96,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=768,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )

    def batch(rng: torch.Generator) -> Batch:
        images = torch.randn(6, 3, 96, 96, generator=rng)
        return {"pixel_values": images, "labels": _tokens(rng, 10, 6)}

    return _case(lambda: transformers.ViTForImageClassification(config), batch)


def swin() -> Case:
    """Shifted windows over three stages, 4 images of 112 x 112, dropout and drop path 0.1."""
    config = transformers.SwinConfig(
        image_size=112,
        patch_size=4,
        embed_dim=64,
        depths=[2, 4, 2],
        num_heads=[2, 4, 8],
        window_size=7,
        drop_path_rate=0.1,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )

    def batch(rng: torch.Generator) -> Batch:
        images = torch.randn(4, 3, 112, 112, generator=rng)
        return {"pixel_values": images, "labels": _tokens(rng, 10, 4)}

    return _case(lambda: transformers.SwinForImageClassification(config), batch)


def resnet() -> Case:
    """ResNet-50's depths at half its width, 20 images of 96 x 96, loss outside."""
    config = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[128, 256, 512, 1024],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        num_labels=10,
    )
    return _case(
        lambda: transformers.ResNetForImageClassification(config),
        lambda rng: {"args": (torch.randn(20, 3, 96, 96, generator=rng),)},
        lambda rng: CrossEntropy(_tokens(rng, 10, 20)),
    )


def convnext() -> Case:
    """Three stages of widths 48 to 192, 16 images of 96 x 96, drop path, loss outside."""
    config = transformers.ConvNextConfig(
        patch_size=4,
        num_stages=3,
        hidden_sizes=[48, 96, 192],
        depths=[3, 6, 3],
        drop_path_rate=0.1,
        layer_scale_init_value=0.5,
        image_size=96,
        num_labels=10,
    )
    return _case(
        lambda: transformers.ConvNextForImageClassification(config),
        lambda rng: {"args": (torch.randn(16, 3, 96, 96, generator=rng),)},
        lambda rng: CrossEntropy(_tokens(rng, 10, 16)),
    )


def whisper() -> Case:
    """Four layers of encoder and decoder, width 256, 3 x 250 frames and 3 x 96 tokens."""
    config = transformers.WhisperConfig(
        vocab_size=1000,
        num_mel_bins=80,
        d_model=256,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_source_positions=250,
        max_target_positions=128,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        use_cache=False,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )

    def batch(rng: torch.Generator) -> Batch:
        sound = torch.randn(3, 80, 500, generator=rng)
        return {"input_features": sound, "labels": _tokens(rng, 1000, 3, 96)}

    return _case(lambda: transformers.WhisperForConditionalGeneration(config), batch)


def unet() -> Case:
    """Text-conditioned diffusion UNet, widths 64 and 128, 2 latents of 32 x 32, dropout 0.1."""

    def build() -> nn.Module:
        model: nn.Module = diffusers.UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(64, 128),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=2,
            cross_attention_dim=64,
            attention_head_dim=4,
            norm_num_groups=8,
            dropout=0.1,
        )
        return model

    def batch(rng: torch.Generator) -> Batch:
        latents = torch.randn(2, 4, 32, 32, generator=rng)
        steps = torch.randint(0, 1000, (2,), generator=rng)
        return {"args": (latents, steps, torch.randn(2, 16, 64, generator=rng))}

    return _case(build, batch, lambda rng: Denoising(torch.randn(2, 4, 32, 32, generator=rng)))


LAYERS = {
    "gpt2": ("GPT2Block",),
    "llama": ("LlamaDecoderLayer",),
    "bert": ("BertLayer",),
    "t5": ("T5Block",),
    "vit": ("ViTLayer",),
    "swin": ("SwinLayer",),
    "resnet": ("ResNetBottleNeckLayer",),
    "convnext": ("ConvNextLayer",),
    "whisper": ("WhisperEncoderLayer", "WhisperDecoderLayer"),
    "unet": ("ResnetBlock2D", "Transformer2DModel"),
}

MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2_design,
    **{f.__name__: f for f in (llama, bert, t5, vit, swin, resnet, convnext, whisper, unet)},
}


def by_hand(name: str, share: float = 1.0) -> Case:
    """The model with its first layers each under its own checkpoint, as people do it."""
    case = MODELS[name]()
    layers = [m for m in case.model.modules() if type(m).__name__ in LAYERS[name]]
    if not layers:
        raise ValueError(f"{name} has no module of class {' or '.join(LAYERS[name])}.")
    for layer in layers[: round(share * len(layers))]:
        plain = layer.forward

        def forward(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        layer.forward = forward
    return case
