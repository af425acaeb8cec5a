"""Real models with random weights, small but with activations that dominate.

Train mode, dropout where the architecture has it, fixed seeds. In each the activation peak is at
least 70 % of the plain step's peak, so that nothing hides behind parameters, and a step takes well
under a second on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import diffusers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn


class Case(NamedTuple):
    """A model in train mode, a batch, and the loss outside the model where there is one."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None


@dataclass(frozen=True)
class CrossEntropy:
    """A loss outside the model, on the logits of an output."""

    labels: Tensor

    def __call__(self, output: Any) -> Tensor:
        return F.cross_entropy(output.logits, self.labels)


@dataclass(frozen=True)
class Denoising:
    """The usual loss of a diffusion model: the noise that was added, in mean square."""

    noise: Tensor

    def __call__(self, output: Any) -> Tensor:
        return F.mse_loss(output.sample, self.noise)


def _tokens(rng: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(1, vocabulary, shape, generator=rng)


def _padding_mask(batch: int, length: int) -> Tensor:
    """One row is full, each further one is an eighth of the length shorter."""
    lengths = length - torch.arange(batch).clamp(max=6) * (length // 8)
    return (torch.arange(length)[None, :] < lengths[:, None]).long()


def _case(
    build: Callable[[], nn.Module],
    batch: Callable[[torch.Generator], Mapping[str, Any]],
    loss: Callable[[torch.Generator], Callable[[Any], Tensor]] | None = None,
) -> Case:
    """Build with fixed seeds, without touching the caller's random state."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = build().train()
    rng = torch.Generator().manual_seed(1)
    kwargs = dict(batch(rng))
    args = kwargs.pop("args", ())
    return Case(model, args, kwargs, loss(rng) if loss else None)


def gpt2(
    layers: int = 4, width: int = 64, heads: int = 4, vocabulary: int = 256, shape=(4, 128)
) -> Case:
    """GPT-2 language model, loss inside, dropout 0.1 everywhere."""
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=shape[1],
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        tokens = _tokens(rng, vocabulary, *shape)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return _case(lambda: transformers.GPT2LMHeadModel(config), batch)


def llama() -> Case:
    """Llama language model with grouped-query attention (two key heads for eight)."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attention_dropout=0.0,
        use_cache=False,
        pad_token_id=0,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        tokens = _tokens(rng, 256, 8, 128)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return _case(lambda: transformers.LlamaForCausalLM(config), batch)


def bert() -> Case:
    """BERT masked language model, padded batch, loss inside, dropout 0.1."""
    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=128,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        tokens, mask = _tokens(rng, 256, 4, 128), _padding_mask(4, 128)
        labels = tokens.masked_fill(mask == 0, -100)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    return _case(lambda: transformers.BertForMaskedLM(config), batch)


def t5() -> Case:
    """T5, encoder and decoder, padded batch, loss inside, dropout 0.1."""
    config = transformers.T5Config(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=192,
        num_layers=3,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        mask = _padding_mask(4, 96)
        source, target = _tokens(rng, 256, 4, 96), _tokens(rng, 256, 4, 64)
        return {"input_ids": source, "attention_mask": mask, "labels": target}

    return _case(lambda: transformers.T5ForConditionalGeneration(config), batch)


def vit() -> Case:
    """ViT image classifier, loss inside, dropout 0.1."""
    config = transformers.ViTConfig(
        image_size=48,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        images = torch.randn(4, 3, 48, 48, generator=rng)
        return {"pixel_values": images, "labels": _tokens(rng, 10, 4)}

    return _case(lambda: transformers.ViTForImageClassification(config), batch)


def swin() -> Case:
    """Swin image classifier: shifted windows, patch merging, drop path and dropout 0.1."""
    config = transformers.SwinConfig(
        image_size=56,
        patch_size=2,
        window_size=7,
        embed_dim=24,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        drop_path_rate=0.1,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        images = torch.randn(4, 3, 56, 56, generator=rng)
        return {"pixel_values": images, "labels": _tokens(rng, 10, 4)}

    return _case(lambda: transformers.SwinForImageClassification(config), batch)


def resnet() -> Case:
    """Bottleneck ResNet with batch normalization, loss outside."""
    config = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[48, 64, 96],
        depths=[3, 6, 3],
        layer_type="bottleneck",
        num_labels=10,
    )
    return _case(
        lambda: transformers.ResNetForImageClassification(config),
        lambda rng: {"args": (torch.randn(16, 3, 64, 64, generator=rng),)},
        lambda rng: CrossEntropy(_tokens(rng, 10, 16)),
    )


def convnext() -> Case:
    """ConvNeXt with drop path, loss outside."""
    config = transformers.ConvNextConfig(
        patch_size=2,
        num_stages=3,
        hidden_sizes=[16, 32, 48],
        depths=[3, 6, 3],
        drop_path_rate=0.1,
        layer_scale_init_value=0.5,
        image_size=48,
        num_labels=10,
    )
    return _case(
        lambda: transformers.ConvNextForImageClassification(config),
        lambda rng: {"args": (torch.randn(8, 3, 48, 48, generator=rng),)},
        lambda rng: CrossEntropy(_tokens(rng, 10, 8)),
    )


def whisper() -> Case:
    """Whisper speech recogniser, loss inside, dropout 0.1."""
    config = transformers.WhisperConfig(
        vocab_size=256,
        num_mel_bins=40,
        d_model=64,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=192,
        decoder_ffn_dim=192,
        max_source_positions=128,
        max_target_positions=64,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        use_cache=False,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        sound = torch.randn(4, 40, 256, generator=rng)
        return {"input_features": sound, "labels": _tokens(rng, 256, 4, 48)}

    return _case(lambda: transformers.WhisperForConditionalGeneration(config), batch)


def unet() -> Case:
    """Text-conditioned diffusion UNet of diffusers, loss outside, dropout 0.1."""

    def build() -> nn.Module:
        return diffusers.UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=32,
            attention_head_dim=2,
            norm_num_groups=8,
            dropout=0.1,
        )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        latents = torch.randn(4, 4, 32, 32, generator=rng)
        steps = torch.randint(0, 1000, (4,), generator=rng)
        return {"args": (latents, steps, torch.randn(4, 8, 32, generator=rng))}

    return _case(build, batch, lambda rng: Denoising(torch.randn(4, 4, 32, 32, generator=rng)))


ZOO: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (gpt2, llama, bert, t5, vit, swin, resnet, convnext, whisper, unet)
}


def gpt2_design() -> Case:
    """The GPT-2 of the published figures: 544 MB of activations in the plain step."""
    return gpt2(layers=12, width=256, heads=4, vocabulary=1000, shape=(4, 256))


class Block(nn.Module):
    """The block of the seed's listing."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d, d)
        self.fc2 = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def seed_blocks(n: int, batch: int = 4096) -> Case:
    """Return ``n`` blocks of width 128 in a row; the loss is the mean of the output."""
    return _case(
        lambda: nn.Sequential(*[Block(128) for _ in range(n)]),
        lambda rng: {"args": (torch.randn(batch, 128, generator=rng),)},
        lambda rng: torch.mean,
    )
