"""The training loop of diffusers' examples: noise, time steps, and a UNet that finds the noise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel

import autockpt
from tests import zoo
from tests.helpers import equal


def train(model: Any, precision: torch.dtype, steps: int = 3) -> tuple[list[float], EMAModel]:
    torch.manual_seed(0)
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    average = EMAModel(model.parameters(), decay=0.9)
    losses = []
    for _ in range(steps):
        clean, text = torch.randn(4, 4, 32, 32), torch.randn(4, 8, 32)
        noise = torch.randn_like(clean)
        times = torch.randint(0, 1000, (4,))
        noisy = scheduler.add_noise(clean, noise, times)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            found = model(noisy, times, encoder_hidden_states=text).sample
            loss = F.mse_loss(found.float(), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.item())
    return losses, average


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_same_losses_and_weights(precision: torch.dtype, tmp_path: Any) -> None:
    plain: Any = zoo.unet().model
    ours: Any = autockpt.optimize(
        copy.deepcopy(plain), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    (expected, first), (found, second) = train(plain, precision), train(ours, precision)
    assert ours.autockpt.plan.regions
    assert len(ours.autockpt._entries) == 1
    assert expected == found
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert equal(p, q)
    assert all(map(equal, first.shadow_params, second.shadow_params))
    ours.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    for p, q in zip(loaded.parameters(), ours.parameters(), strict=True):
        assert equal(p, q)
