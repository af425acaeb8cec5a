"""Architectures that are awkward to plan for: small, random weights, in train mode.

Experts chosen by value, layers dropped by a draw, scans, sparse attention, masks drawn by numpy,
Functions with backwards of their own, samplers. Not among them is Reformer, which seeds torch's
generator from the clock in every forward: no two of its steps are alike, planned or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers as hf
from torch import Tensor, nn

from tests.zoo import Case, CrossEntropy, Denoising, _case, _padding_mask, _tokens

VOCABULARY = 128
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 128,
    "use_cache": False,
}
SPEECH = {
    "vocab_size": 32,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.2,
    "mask_time_length": 4,
    "mask_feature_prob": 0.2,
    "mask_feature_length": 4,
    "layerdrop": 0.3,
    "ctc_loss_reduction": "mean",
    "pad_token_id": 0,
}

AWKWARD: dict[str, Callable[[], Case]] = {}


def _awkward(make: Callable[[], Case]) -> Callable[[], Case]:
    AWKWARD[make.__name__] = make
    return make


def _language(build: Callable[[], nn.Module], length: int = 64, *, masked: bool = False) -> Case:
    def batch(rng: torch.Generator) -> dict[str, Any]:
        tokens = _tokens(rng, VOCABULARY, 4, length)
        mask = {"attention_mask": _padding_mask(4, length)} if masked else {}
        return {"input_ids": tokens, "labels": tokens.clone(), **mask}

    return _case(build, batch)


def _translation(build: Callable[[], nn.Module], length: int = 64) -> Case:
    def batch(rng: torch.Generator) -> dict[str, Any]:
        return {
            "input_ids": _tokens(rng, VOCABULARY, 4, length),
            "attention_mask": _padding_mask(4, length),
            "labels": _tokens(rng, VOCABULARY, 4, 32),
        }

    return _case(build, batch)


def _speech(build: Callable[[], nn.Module]) -> Case:
    def batch(rng: torch.Generator) -> dict[str, Any]:
        return {
            "input_values": torch.randn(4, 4000, generator=rng),
            "labels": _tokens(rng, 32, 4, 12),
        }

    return _case(build, batch)


# Experts


@_awkward
def mixtral() -> Case:
    """Two of four experts a token."""
    config = hf.MixtralConfig(
        **TEXT,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        use_cache=False,
    )
    return _language(lambda: hf.MixtralForCausalLM(config), masked=True)


@_awkward
def qwen2_moe() -> Case:
    """Experts beside a shared one."""
    config = hf.Qwen2MoeConfig(
        **TEXT,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        output_router_logits=True,
        use_cache=False,
    )
    return _language(lambda: hf.Qwen2MoeForCausalLM(config))


@_awkward
def switch_transformers() -> Case:
    """One expert a token, with jitter and a capacity."""
    config = hf.SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=4,
        expert_capacity=32,
        router_jitter_noise=0.1,
        use_cache=False,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return _translation(lambda: hf.SwitchTransformersForConditionalGeneration(config))


@_awkward
def deepseek_v3() -> Case:
    """Latent attention and experts in groups."""
    config = hf.DeepseekV3Config(
        **TEXT,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        use_cache=False,
    )
    return _language(lambda: hf.DeepseekV3ForCausalLM(config))


# Layers that a draw leaves out, masks drawn by numpy, CTC


@_awkward
def wav2vec2_ctc() -> Case:
    """Numpy draws masks of time and features, python leaves layers out."""
    config = hf.Wav2Vec2Config(**SPEECH)
    return _speech(lambda: hf.Wav2Vec2ForCTC(config))


@_awkward
def hubert_ctc() -> Case:
    """The same family, with an encoder whose norms come first."""
    config = hf.HubertConfig(**SPEECH, do_stable_layer_norm=True, feat_extract_norm="layer")
    return _speech(lambda: hf.HubertForCTC(config))


@_awkward
def wavlm_ctc() -> Case:
    """Relative positions with a gate, in python."""
    config = hf.WavLMConfig(**{**SPEECH, "mask_feature_prob": 0.0})
    return _speech(lambda: hf.WavLMForCTC(config))


@_awkward
def opt_layerdrop() -> Case:
    """A decoder whose layers are left out by a draw."""
    config = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_dim=96,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        layerdrop=0.3,
        use_cache=False,
    )
    return _language(lambda: hf.OPTForCausalLM(config))


@_awkward
def bart_layerdrop() -> Case:
    """Layers of encoder and decoder are left out by a draw."""
    config = hf.BartConfig(
        **ENCODER_DECODER, encoder_layerdrop=0.3, decoder_layerdrop=0.3, dropout=0.1
    )
    return _translation(lambda: hf.BartForConditionalGeneration(config))


@_awkward
def m2m100() -> Case:
    """Sinusoidal positions from the tokens, layers left out."""
    config = hf.M2M100Config(
        **ENCODER_DECODER, encoder_layerdrop=0.2, decoder_layerdrop=0.2, pad_token_id=0
    )
    return _translation(lambda: hf.M2M100ForConditionalGeneration(config))


@_awkward
def pegasus() -> Case:
    """An encoder-decoder with static positions."""
    config = hf.PegasusConfig(**ENCODER_DECODER, pad_token_id=0)
    return _translation(lambda: hf.PegasusForConditionalGeneration(config))


@_awkward
def prophetnet() -> Case:
    """Streams of predictions, several tokens ahead."""
    config = hf.ProphetNetConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        encoder_ffn_dim=96,
        num_encoder_layers=2,
        num_encoder_attention_heads=4,
        decoder_ffn_dim=96,
        num_decoder_layers=2,
        num_decoder_attention_heads=4,
        max_position_embeddings=128,
        use_cache=False,
        pad_token_id=0,
    )
    return _translation(lambda: hf.ProphetNetForConditionalGeneration(config))


# Scans


@_awkward
def mamba() -> Case:
    """A selective scan in a python loop."""
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, use_cache=False
    )
    return _language(lambda: hf.MambaForCausalLM(config), 24)


@_awkward
def mamba2() -> Case:
    """A scan in chunks."""
    config = hf.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        state_size=8,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        chunk_size=16,
        use_cache=False,
    )
    return _language(lambda: hf.Mamba2ForCausalLM(config))


@_awkward
def rwkv() -> Case:
    """Linear attention in a python loop over time."""
    config = hf.RwkvConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        attention_hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        context_length=64,
        use_cache=False,
    )
    return _language(lambda: hf.RwkvForCausalLM(config), 24)


@_awkward
def recurrent_gemma() -> Case:
    """Recurrent blocks whose state is left in attributes."""
    config = hf.RecurrentGemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        lru_width=48,
        attention_window_size=32,
        use_cache=False,
    )
    return _language(lambda: hf.RecurrentGemmaForCausalLM(config), 24)


@_awkward
def jamba() -> Case:
    """Scans, attention and experts in turn."""
    config = hf.JambaConfig(
        **{k: v for k, v in TEXT.items() if k != "max_position_embeddings"},
        num_key_value_heads=2,
        num_experts=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
        use_cache=False,
    )
    return _language(lambda: hf.JambaForCausalLM(config), 24)


# Sparse and local attention


@_awkward
def longformer() -> Case:
    """Sliding windows, with some tokens that see all."""
    config = hf.LongformerConfig(**TEXT, attention_window=16, pad_token_id=0)
    return _language(lambda: hf.LongformerForMaskedLM(config), masked=True)


@_awkward
def led() -> Case:
    """The same in an encoder-decoder, layers left out by a draw."""
    config = hf.LEDConfig(
        **{k: v for k, v in ENCODER_DECODER.items() if k != "max_position_embeddings"},
        max_encoder_position_embeddings=128,
        max_decoder_position_embeddings=64,
        attention_window=16,
        encoder_layerdrop=0.2,
        pad_token_id=0,
    )
    return _translation(lambda: hf.LEDForConditionalGeneration(config))


@_awkward
def big_bird() -> Case:
    """Random blocks of attention, drawn by numpy."""
    config = hf.BigBirdConfig(
        **TEXT, attention_type="block_sparse", block_size=4, num_random_blocks=2, use_cache=False
    )
    return _language(lambda: hf.BigBirdForMaskedLM(config), 96)


@_awkward
def funnel() -> Case:
    """Pools the sequence between blocks."""
    config = hf.FunnelConfig(
        vocab_size=VOCABULARY,
        block_sizes=[1, 1, 1],
        d_model=48,
        n_head=4,
        d_head=12,
        d_inner=96,
    )
    return _language(lambda: hf.FunnelForMaskedLM(config), masked=True)


@_awkward
def nystromformer() -> Case:
    """Landmarks, and an iterated pseudo-inverse."""
    config = hf.NystromformerConfig(**TEXT, num_landmarks=8, segment_means_seq_len=64)
    return _language(lambda: hf.NystromformerForMaskedLM(config))


# Functions of their own


@_awkward
def deberta_v2() -> Case:
    """Disentangled attention, scripted helpers."""
    config = hf.DebertaV2Config(
        **TEXT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        conv_kernel_size=3,
    )
    return _language(lambda: hf.DebertaV2ForMaskedLM(config), masked=True)


@_awkward
def ibert() -> Case:
    """Rounding Functions, ranges kept in buffers."""
    config = hf.IBertConfig(**TEXT, quant_mode=True, pad_token_id=0)
    return _language(lambda: hf.IBertForMaskedLM(config))


@_awkward
def xlnet() -> Case:
    """Two streams, relative positions by shifting."""
    config = hf.XLNetConfig(vocab_size=VOCABULARY, d_model=48, n_layer=3, n_head=4, d_inner=96)
    return _language(lambda: hf.XLNetLMHeadModel(config))


# Several towers, series, sets


@_awkward
def clip() -> Case:
    """A contrastive loss between two towers."""
    text = {k: v for k, v in TEXT.items() if k != "max_position_embeddings"}
    config = hf.CLIPConfig(
        text_config={**text, "max_position_embeddings": 32, "eos_token_id": 2},
        vision_config={**text, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        return {
            "input_ids": _tokens(rng, VOCABULARY, 4, 24),
            "pixel_values": torch.randn(4, 3, 32, 32, generator=rng),
            "return_loss": True,
        }

    return _case(lambda: hf.CLIPModel(config), batch)


@_awkward
def perceiver() -> Case:
    """Latents that look at bytes."""
    config = hf.PerceiverConfig(
        vocab_size=VOCABULARY,
        num_latents=16,
        d_latents=48,
        d_model=48,
        num_blocks=1,
        num_self_attends_per_block=3,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=48,
        v_channels=48,
        max_position_embeddings=64,
    )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        tokens = _tokens(rng, VOCABULARY, 4, 64)
        return {"inputs": tokens, "labels": tokens.clone()}

    return _case(lambda: hf.PerceiverForMaskedLM(config), batch)


@_awkward
def time_series() -> Case:
    """The likelihood of a distribution, scaled by what was seen."""
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=8,
        context_length=24,
        lags_sequence=[1, 2, 3],
        num_time_features=2,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
        use_cache=False,
    )
    return _case(lambda: hf.TimeSeriesTransformerForPrediction(config), _series)


@_awkward
def autoformer() -> Case:
    """Attention by autocorrelation, in the frequency domain."""
    config = hf.AutoformerConfig(
        prediction_length=8,
        context_length=24,
        label_length=4,
        lags_sequence=[1, 2, 3],
        num_time_features=2,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        moving_average=5,
        use_cache=False,
    )
    return _case(lambda: hf.AutoformerForPrediction(config), _series)


def _series(rng: torch.Generator) -> dict[str, Any]:
    past, future = 27, 8
    return {
        "past_values": torch.rand(8, past, generator=rng) + 0.5,
        "past_time_features": torch.randn(8, past, 2, generator=rng),
        "past_observed_mask": torch.ones(8, past),
        "future_values": torch.rand(8, future, generator=rng) + 0.5,
        "future_time_features": torch.randn(8, future, 2, generator=rng),
    }


@_awkward
def vit_mae() -> Case:
    """Patches hidden by a draw; the loss is of those."""
    config = hf.ViTMAEConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        decoder_hidden_size=48,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=96,
        image_size=32,
        patch_size=4,
    )
    return _case(
        lambda: hf.ViTMAEForPreTraining(config),
        lambda rng: {"pixel_values": torch.randn(4, 3, 32, 32, generator=rng)},
    )


@_awkward
def levit() -> Case:
    """Attention that shrinks, batch norms everywhere, biases by index."""
    config = hf.LevitConfig(
        image_size=64,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        num_labels=10,
    )
    return _case(
        lambda: hf.LevitForImageClassification(config),
        lambda rng: {"pixel_values": torch.randn(4, 3, 64, 64, generator=rng)},
        lambda rng: CrossEntropy(_tokens(rng, 10, 4)),
    )


# Diffusion


@_awkward
def autoencoder_kl() -> Case:
    """A variational autoencoder that samples its latents."""

    def build() -> nn.Module:
        return diffusers.AutoencoderKL(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=8,
            sample_size=32,
        )

    return _case(
        build,
        lambda rng: {
            "sample": torch.randn(2, 3, 32, 32, generator=rng),
            "sample_posterior": True,
        },
        lambda rng: Denoising(torch.randn(2, 3, 32, 32, generator=rng)),
    )


@_awkward
def vq_model() -> Case:
    """Latents rounded to a codebook, straight through."""

    def build() -> nn.Module:
        return diffusers.VQModel(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            num_vq_embeddings=16,
            norm_num_groups=8,
        )

    return _case(
        build,
        lambda rng: {"sample": torch.randn(2, 3, 32, 32, generator=rng)},
        lambda rng: Denoising(torch.randn(2, 3, 32, 32, generator=rng)),
    )


@_awkward
def unet_1d() -> Case:
    """A UNet of one dimension, with Fourier features."""

    def build() -> nn.Module:
        return diffusers.UNet1DModel(
            sample_size=256,
            block_out_channels=(16, 32, 32),
            in_channels=2,
            out_channels=2,
            extra_in_channels=32,
        )

    return _case(
        build,
        lambda rng: {
            "sample": torch.randn(4, 2, 256, generator=rng),
            "timestep": _tokens(rng, 100, 4),
        },
        lambda rng: Denoising(torch.randn(4, 2, 256, generator=rng)),
    )


@_awkward
def prior() -> Case:
    """The prior of Kandinsky, from text to the embedding of an image."""

    def build() -> nn.Module:
        return diffusers.PriorTransformer(
            num_attention_heads=4,
            attention_head_dim=12,
            num_layers=3,
            embedding_dim=48,
            num_embeddings=32,
            additional_embeddings=4,
        )

    def batch(rng: torch.Generator) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(4, 48, generator=rng),
            "timestep": _tokens(rng, 100, 4),
            "proj_embedding": torch.randn(4, 48, generator=rng),
            "encoder_hidden_states": torch.randn(4, 32, 48, generator=rng),
        }

    target = torch.randn(4, 48, generator=torch.Generator().manual_seed(2))
    return _case(build, batch, lambda _: _Predicted(target))


class _Predicted:
    """Mean square of a predicted embedding."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def __call__(self, output: Any) -> Tensor:
        return nn.functional.mse_loss(output.predicted_image_embedding, self.target)
