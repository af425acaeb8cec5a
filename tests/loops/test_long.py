"""Five hundred steps: the same losses, and nothing grows."""

from __future__ import annotations

import copy
import gc
import resource
import statistics
import time
from typing import Any

import torch
import transformers
from torch import nn

import autockpt
from tests.helpers import equal

STEPS = 500
WARM = 100


def language_model() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def train(model: nn.Module) -> tuple[list[float], list[float], list[int], list[int]]:
    """Losses, seconds, python objects and resident kilobytes, step by step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, seconds, objects, resident = [], [], [], []
    rng = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    for step in range(STEPS):
        # Two lengths in turn, as bucketed batches have.
        tokens = torch.randint(64, (8, 32 if step % 3 else 24), generator=rng)
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if step % 50 == 49:
            gc.collect()
            objects.append(len(gc.get_objects()))
            resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return losses, seconds, objects, resident


def test_five_hundred_steps() -> None:
    plain = language_model()
    ours: Any = autockpt.optimize(
        copy.deepcopy(plain), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    expected, *_ = train(plain)
    losses, seconds, objects, resident = train(ours)
    assert ours.autockpt.plan.regions
    assert len(ours.autockpt._entries) == 2
    assert losses == expected
    assert losses[-1] < losses[0]
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert equal(p, q)
    # The lists above take their room: a few objects, no tensors.
    assert objects[-1] - objects[1] < 50
    assert resident[-1] - resident[1] < 2**10  # kB
    early, late = seconds[WARM : 2 * WARM], seconds[-WARM:]
    assert min(late) < 1.2 * min(early)
    assert statistics.median(late) < 2 * statistics.median(early)
