"""Lightning: a module that is optimized, or one that holds an optimized model."""

from __future__ import annotations

import copy
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import autockpt
from tests import zoo
from tests.helpers import equal


class Task(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (ids,) = batch
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        (ids,) = batch
        self.log("held_out", self.model(input_ids=ids, labels=ids).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(task: Task, folder: Any, **arguments: Any) -> None:
    lightning.seed_everything(1, verbose=False)
    tokens = torch.randint(1, 256, (16, 64))
    loader = DataLoader(TensorDataset(tokens), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )
    trainer.fit(task, loader, loader)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.filterwarnings("ignore")
def test_same_losses_and_weights(precision: Any, tmp_path: Any) -> None:
    case = zoo.gpt2(layers=2)
    ours: Any = autockpt.optimize(
        copy.deepcopy(case.model), memory_budget="60%", cost="roofline", solver="interval_dp"
    )
    tasks = [Task(case.model), Task(ours)]
    for number, task in enumerate(tasks):
        fit(task, tmp_path / str(number), precision=precision)
    assert ours.autockpt.plan.regions
    assert tasks[0].losses == tasks[1].losses
    for p, q in zip(case.model.parameters(), ours.parameters(), strict=True):
        assert equal(p, q)
    (saved,) = (tmp_path / "1").rglob("*.ckpt")
    loaded = torch.load(saved, weights_only=False)["state_dict"]
    assert all(map(equal, loaded.values(), tasks[1].state_dict().values()))
