"""transformers' Trainer: the optimized model is what it is given, and nothing else is needed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset

import autockpt
from tests import zoo
from tests.helpers import equal

Example = dict[str, Tensor]


class Sentences(Dataset[Example]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Example:
        tokens = torch.randint(1, 256, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(model: Any, folder: Path, **arguments: Any) -> Any:
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **{"save_strategy": "no", **arguments},
    )
    trainer = transformers.Trainer(
        model=model, args=settings, train_dataset=Sentences(), eval_dataset=Sentences()
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bf16": True}, {"eval_strategy": "steps", "eval_steps": 2}],
    ids=["fp32", "bf16", "evaluated"],
)
def test_same_losses_and_weights(arguments: dict[str, Any], tmp_path: Path) -> None:
    case = zoo.gpt2(layers=2)
    ours: Any = autockpt.optimize(
        copy.deepcopy(case.model), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    trainers = [
        train(model, tmp_path / str(number), **arguments)
        for number, model in enumerate((case.model, ours))
    ]
    # The last batch of an epoch is smaller, and fits without regions.
    assert any(entry.step.plan.regions for entry in ours.autockpt._entries)
    expected, found = (
        [log["loss"] for log in trainer.state.log_history if "loss" in log] for trainer in trainers
    )
    assert expected == found
    assert len(found) == 4
    # The Trainer trains what it was given, and leaves it in train mode.
    for p, q in zip(case.model.parameters(), ours.parameters(), strict=True):
        assert equal(p, q)


def test_saved_loaded_and_gone_on(tmp_path: Path) -> None:
    case = zoo.gpt2(layers=2)
    ours: Any = autockpt.optimize(
        copy.deepcopy(case.model), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    train(ours, tmp_path, save_strategy="steps").save_model(str(tmp_path / "end"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "end")
    for p, q in zip(loaded.parameters(), ours.parameters(), strict=True):
        assert equal(p, q)
