"""Planning of models that no memory here could hold, on the meta device.

python -m benchmarks.giants

Published shapes of transformers and diffusers, a budget of 30 % and cost="roofline" (nothing takes
time on meta). Each in a process of its own: seconds of ``optimize``, and what the process had
resident at most, before and after.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autockpt
from benchmarks.common import MB, show

Made = tuple[nn.Module, dict[str, Any]]


def llama3_70b() -> Made:
    """80 layers of width 8,192, one sequence of 4,096 tokens.

    The mask is given: without one, the model asks a tensor whether sequences are packed, which no
    tensor on meta can answer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    mask = torch.zeros(1, 1, 4096, 4096, dtype=torch.bfloat16)
    return model, {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def sdxl_unet() -> Made:
    """The UNet of Stable Diffusion XL, one latent of 128 x 128."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=128,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280),
        cross_attention_dim=2048,
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    return model.train(), {
        "sample": torch.zeros(1, 4, 128, 128),
        "timestep": torch.zeros(1, dtype=torch.long),
        "encoder_hidden_states": torch.zeros(1, 77, 2048),
        "added_cond_kwargs": {
            "text_embeds": torch.zeros(1, 1280),
            "time_ids": torch.zeros(1, 6),
        },
    }


GIANTS: dict[str, Callable[[], Made]] = {
    "Llama-3-70B, 1 x 4,096": llama3_70b,
    "SDXL's UNet, 128 x 128": sdxl_unet,
}


def main() -> None:
    """Print a row a model."""
    rows = []
    for name in GIANTS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(planned, (name,)))
    show("Planned on meta, budget 30 %", rows, "giants")


def planned(name: str) -> dict[str, Any]:
    """Plan one."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model, batch = GIANTS[name]()
    before = _resident()
    start = time.perf_counter()
    found: Any = autockpt.optimize(model, (), batch, memory_budget="30%", cost="roofline")
    seconds = time.perf_counter() - start
    report = found.autockpt.report
    return {
        "model": name,
        "ops": len(found.autockpt.problem.ops),
        "plain GB": report.plain_peak_bytes / 1e9,
        "planned GB": report.peak_bytes / 1e9,
        "recompute": report.recompute_share,
        "bound": report.bound_share,
        "seconds": seconds,
        "MB before": before / MB,
        "MB": _resident() / MB,
    }


def _resident() -> int:
    """Most bytes this process ever had resident (kB are reported on Linux, bytes on macOS)."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


if __name__ == "__main__":
    main()
