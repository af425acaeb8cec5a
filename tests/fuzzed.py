"""Random modules of real parts: a seed gives a model, a batch and a budget."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

WIDTH, HEADS, VOCABULARY = 32, 4, 64
BUDGETS = ("90%", "75%", "60%", "45%", "30%")

PARTS: dict[str, Callable[[], nn.Module]] = {}


def _part(make: Any) -> Any:
    PARTS[make.__name__.strip("_").lower()] = make
    return make


class Double(torch.autograd.Function):
    """A Function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * x.abs()


@_part
class Feed(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))


@_part
class Norm(nn.Module):
    """One of the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.batch = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.group = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.layer(x).transpose(1, 2))
        return self.group(y).transpose(1, 2)


@_part
class Convolution(nn.Module):
    """A convolution with weight norm, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.conv(x.transpose(1, 2))).transpose(1, 2)


@_part
class Spectral(nn.Module):
    """A spectral norm: its buffers move at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


@_part
class Picture(nn.Module):
    """A convolution of two dimensions, pooled and blown up again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.mix = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(self.conv(x.unsqueeze(1)).relu(), 2)
        return self.mix(F.interpolate(y, scale_factor=2.0)).squeeze(1)


@_part
class Attention(nn.Module):
    """Attention as torch has it, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return found


@_part
class Encoder(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


@_part
class Causal(nn.Module):
    """Attention with a mask that is made on the spot."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return F.dropout(scores.softmax(-1), 0.1, self.training) @ v


@_part
class Recurrent(nn.Module):
    """A GRU and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(self.gru(x)[0])[0]
        return found


@_part
class Loop(nn.Module):
    """A cell in a python loop, results gathered in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x[:, 0], []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states, 1)


@_part
class Branch(nn.Module):
    """Python looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.detach().mean() > 0):
            return self.first(x).tanh()
        return self.second(x).sigmoid()


@_part
class Dropped(nn.Module):
    """A part that a draw of torch leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()).item() < 0.4:
            return x
        found: Tensor = self.inner(x)
        return found


@_part
class Python(nn.Module):
    """A draw of python's generator, and one of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(np.random.rand())
        return self.linear(x).tanh() * scale


@_part
class Average(nn.Module):
    """A running mean of its own, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.mean: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            self.count += 1
        return (x - self.mean).sigmoid()


@_part
class Counted(nn.Module):
    """A python attribute that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).relu() / (1 + self.calls)


@_part
class Experts(nn.Module):
    """Tokens go where a router sends them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        total = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if rows.numel():
                total.index_add_(0, rows, F.gelu(expert(flat[rows])) * weights[rows, None])
        return total.view_as(x)


@_part
class Writes(nn.Module):
    """Slices written in place, views of views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, :2] = y[:, :2].tanh()
        z = torch.zeros_like(y)
        z[:, 1:] = y[:, :-1]
        z.transpose(1, 2)[:, 0].add_(1.0)
        return z.mul_(2).sin()


@_part
class Sorted(nn.Module):
    """Order, prefix sums, gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values, order = (x * self.scale).sort(dim=-1)
        return values.cumsum(-1).gather(-1, order).tanh()


@_part
class Custom(nn.Module):
    """A Function, an einsum, a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("blw,wv->blv", Double.apply(x.tanh()), self.weight)
        return y + torch.fft.fft(y, dim=1).real.sigmoid()


@_part
class Noise(nn.Module):
    """Draws of torch, with and without a tensor to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.randn_like(x) * self.spread
        return y * torch.bernoulli(torch.full_like(y, 0.9)) + torch.randn(WIDTH)


@_part
class Low(nn.Module):
    """Autocast inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x).tanh().float()


class Fuzzed(nn.Module):
    """Parts one after the other, some with a residual, some used twice."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=None)
        kinds = rng.choices(sorted(PARTS), k=rng.randint(3, 9))
        self.parts = nn.ModuleList(PARTS[kind]() for kind in kinds)
        self.order = [*range(len(kinds)), *rng.sample(range(len(kinds)), rng.choice((0, 0, 1, 2)))]
        self.residual = [rng.random() < 0.6 for _ in self.order]
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if rng.random() < 0.5:
            self.head.weight = self.embed.weight
        self.nested = rng.random() < 0.5

    def forward(self, tokens: Tensor, bias: Tensor) -> Any:
        x = self.embed(tokens) + bias
        for number, residual in zip(self.order, self.residual, strict=True):
            found = self.parts[number](x)
            x = x + found if residual else found
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return {"loss": loss, "all": (logits, {"x": x})} if self.nested else loss


@dataclass(frozen=True)
class Drawn:
    """What a seed gives."""

    model: Fuzzed
    args: tuple[Tensor, Tensor]
    budget: str


def draw(seed: int) -> Drawn:
    """Draw a model, a batch and a budget, without touching the caller's random state."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Fuzzed(rng).train(rng.random() < 0.9)
        shape = rng.choice((4, 8, 16)), rng.choice((16, 32, 64))
        tokens = torch.randint(VOCABULARY, shape)
        bias = torch.randn(*shape, WIDTH).requires_grad_(rng.random() < 0.3)
        for parameter in model.parameters():
            parameter.requires_grad_(rng.random() < 0.9)
        model.head.weight.requires_grad_(True)
    return Drawn(model, (tokens, bias), rng.choice(BUDGETS))
