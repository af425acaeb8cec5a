"""Real models trained inside budgets: what ``python -m autockpt demo`` shows.

The models come from transformers and diffusers with random weights; nothing is downloaded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from autockpt.api import optimize
from autockpt.profiler.aten_log import AtenLog
from autockpt.runtime.handle import Handle
from autockpt.step import Loss, loss_of
from autockpt.units import format_bytes
from autockpt.verify import verify

BUDGETS = ("50%", "30%")
_PAIRS = 7


class MissingLibraryError(ImportError):
    """The demo's models come from a library that is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model in train mode, a batch and a loss."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any]
    loss: Loss | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was seen of one model at one budget.

    Attributes
    ----------
    model, budget : str
    budget_bytes, plain_bytes, predicted_bytes, measured_bytes, fixed_bytes : int
        Peaks include the fixed bytes; the plain one is measured.
    time_ratio : float
        Median over interleaved pairs of steps, planned over plain.
    flop_ratio : float
        Counted as they ran, planned over plain.
    recompute_share, bound_share : float
        Predicted cost of what runs again as a share of a forward's, and what no schedule can
        go below.
    regions : int
    plan_seconds : float
        From the call of ``optimize`` to its return.
    differences : tuple of str
        What is not equal to the bit.
    """

    model: str
    budget: str
    budget_bytes: int
    plain_bytes: int
    predicted_bytes: int
    measured_bytes: int
    fixed_bytes: int
    time_ratio: float
    flop_ratio: float
    recompute_share: float
    bound_share: float | None
    regions: int
    plan_seconds: float
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the budget holds and every bit is equal."""
        return not self.differences and self.measured_bytes <= self.budget_bytes

    @property
    def reason(self) -> str:
        """Say what is wrong, in words; empty if nothing is."""
        reasons = []
        if self.measured_bytes > self.budget_bytes:
            over = format_bytes(self.measured_bytes - self.budget_bytes, round_up=True)
            reasons.append(f"the measured peak is {over} over the budget")
        if self.differences:
            reasons.append(f"not equal to the bit: {', '.join(self.differences)}")
        return "; ".join(reasons)

    @property
    def prediction_error(self) -> float:
        """Predicted less measured, as a share of the measured activation peak."""
        activations = self.measured_bytes - self.fixed_bytes
        return (self.predicted_bytes - self.measured_bytes) / activations if activations else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that ``json.dumps`` takes."""
        return asdict(self) | {"ok": self.ok, "prediction_error": self.prediction_error}


def examples(
    size: Literal["small", "large"] = "small", device: str = "cpu"
) -> dict[str, Callable[[], Example]]:
    """Return makers of the demo's models, by name.

    Raises
    ------
    MissingLibraryError
        transformers or diffusers is not installed.
    """
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise MissingLibraryError(
            f"The demo trains models of transformers and diffusers, and {error.name} is not "
            f"installed: pip install 'autockpt[demo]'."
        ) from error
    big = size == "large"

    def gpt2() -> Example:
        length, vocabulary = (1024, 8192) if big else (256, 512)
        config = transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=768 if big else 128,
            n_layer=12 if big else 6,
            n_head=12 if big else 4,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(config).to(device).train()
        tokens = torch.randint(vocabulary, (8 if big else 4, length), device=device)
        return Example(name="GPT-2", model=model, kwargs={"input_ids": tokens, "labels": tokens})

    def resnet() -> Example:
        config = transformers.ResNetConfig(
            embedding_size=64 if big else 32,
            hidden_sizes=[256, 512, 1024, 2048] if big else [64, 128, 256, 512],
            depths=[3, 4, 6, 3],
            num_labels=100,
        )
        model = transformers.ResNetForImageClassification(config).to(device).train()
        batch, side = (64, 224) if big else (8, 128)
        images = torch.randn(batch, 3, side, side, device=device)
        labels = torch.randint(100, (batch,), device=device)
        kwargs = {"pixel_values": images, "labels": labels}
        return Example(name="ResNet", model=model, kwargs=kwargs)

    def unet() -> Example:
        width = 160 if big else 32
        model = diffusers.UNet2DConditionModel(
            sample_size=64 if big else 32,
            block_out_channels=(width, 2 * width),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=2,
            cross_attention_dim=8 * (width // 8),
            attention_head_dim=max(2, width // 40),
            norm_num_groups=8,
            dropout=0.1,
        )
        batch, side = (16, 64) if big else (4, 32)
        latents = torch.randn(batch, 4, side, side, device=device)
        steps = torch.randint(1000, (batch,), device=device)
        text = torch.randn(batch, 16, 8 * (width // 8), device=device)
        noise = torch.randn_like(latents)

        def loss(output: Any) -> Tensor:
            return F.mse_loss(output.sample, noise)

        return Example(
            name="UNet",
            model=model.to(device).train(),
            args=(latents, steps, text),
            kwargs={},
            loss=loss,
        )

    return {"gpt2": gpt2, "resnet": resnet, "unet": unet}


def run(example: Example, budget: str) -> tuple[Row, nn.Module]:
    """Optimize one model for one budget and look at everything that was promised.

    Returns
    -------
    row : Row
    optimized : Module
    """
    start = time.perf_counter()
    optimized = optimize(
        example.model, example.args, example.kwargs, memory_budget=budget, loss=example.loss
    )
    plan_seconds = time.perf_counter() - start
    seen = verify(example.model, optimized, example.args, example.kwargs, loss=example.loss)
    report = cast(Handle, optimized.autockpt).report
    assert report.budget_bytes is not None
    row = Row(
        model=example.name,
        budget=budget,
        budget_bytes=report.budget_bytes,
        plain_bytes=seen.plain_peak_bytes,
        predicted_bytes=report.peak_bytes,
        measured_bytes=seen.peak_bytes,
        fixed_bytes=seen.fixed_bytes,
        time_ratio=time_ratio(example, optimized),
        flop_ratio=count_flops(example, optimized) / count_flops(example, example.model),
        recompute_share=report.recompute_share,
        bound_share=report.bound_share,
        regions=len(report.regions),
        plan_seconds=plan_seconds,
        differences=seen.differences,
    )
    return row, optimized


def time_ratio(example: Example, optimized: nn.Module, pairs: int = _PAIRS) -> float:
    """Return the median, over interleaved pairs, of planned over plain step time."""
    ratios = []
    for _ in range(pairs):
        plain = _step_seconds(example, example.model)
        ratios.append(_step_seconds(example, optimized) / plain)
    return statistics.median(ratios)


def count_flops(example: Example, model: nn.Module) -> int:
    """Return the FLOPs of a step as it runs."""
    # Counting slows a step down, so it is done apart from timing.
    with AtenLog() as log:
        _step(example, model)
    return int(log.tally.flops)


def _step_seconds(example: Example, model: nn.Module) -> float:
    _synchronize()
    start = time.perf_counter()
    _step(example, model)
    _synchronize()
    return time.perf_counter() - start


def _step(example: Example, model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    loss_of(model(*example.args, **example.kwargs), example.loss).backward()


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def table(rows: Iterable[Row]) -> Table:
    """Lay rows out for people."""
    shown = Table(
        title="One training step; peaks in MiB, parameters and gradients included", expand=False
    )
    shown.add_column("model")
    headings = ("plain peak", "budget", "predicted", "measured")
    for name in ("asked", *headings, "time", "FLOPs", "runs again", "bound"):
        shown.add_column(name, justify="right")
    shown.add_column("bits")
    for row in rows:
        style = "" if row.ok else "bold red"
        peaks = (row.plain_bytes, row.budget_bytes, row.predicted_bytes, row.measured_bytes)
        shown.add_row(
            row.model,
            row.budget,
            *(f"{nbytes / 2**20:.2f}" for nbytes in peaks),
            f"{row.time_ratio:.2f}x",
            f"{row.flop_ratio:.2f}x",
            f"{row.recompute_share:.1%}",
            "" if row.bound_share is None else f"{row.bound_share:.1%}",
            f"{len(row.differences)} differ" if row.differences else "equal",
            style=style,
        )
    return shown
