"""A sample of torch's own databases of modules and ops, each inside regions.

In a process of its own: importing the databases switches torch's global flags off.
"""

from __future__ import annotations

import pytest

from benchmarks.databases import sweep
from benchmarks.trial import Trial

SAMPLE = (
    *("op: cat", "op: cumsum", "op: einsum", "op: fft_irfft", "op: gather", "op: index_put"),
    *("op: linalg_eigh", "op: linalg_svd", "op: masked_fill", "op: max_reduction_with_dim"),
    *("op: native_batch_norm", "op: nn_functional_conv2d", "op: nn_functional_embedding"),
    *("op: nn_functional_rrelu", "op: nn_functional_scaled_dot_product_attention"),
    *("op: nn_functional_ctc_loss", "op: sort", "op: where", "op: view_as_complex"),
    *("in place: add", "in place: index_fill", "in place: masked_fill", "in place: clamp"),
    *("in place: sigmoid", "in place: unsqueeze", "in place: t", "in place: squeeze"),
    *("module: nn.BatchNorm2d", "module: nn.CTCLoss", "module: nn.GRU", "module: nn.LSTM"),
    *("module: nn.Embedding", "module: nn.InstanceNorm1d", "module: nn.MultiheadAttention"),
    *("module: nn.TransformerDecoderLayer", "module: nn.AdaptiveMaxPool2d", "module: nn.PReLU"),
    *("module in eval: nn.BatchNorm1d", "module in eval: nn.Transformer"),
)


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return list(sweep(SAMPLE, samples=1, emit="auto", workers=1))


def test_no_number_is_wrong_and_nothing_crashes(trials: list[Trial]) -> None:
    assert len(trials) >= len(SAMPLE)
    bad = [t for t in trials if t.kind not in ("graph", "modules")]
    assert not bad, bad


def test_what_is_tested_runs_again(trials: list[Trial]) -> None:
    again = sum(trial.recomputed > 0 for trial in trials)
    covered = sum(trial.covered for trial in trials)
    assert again >= 0.95 * len(trials)
    assert covered >= 0.75 * len(trials)
