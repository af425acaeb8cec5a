"""Facts of single ops: what they keep, alias, allocate and draw, on real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autockpt.meters import CpuMeter, collector_off
from autockpt.profiler import Roofline
from autockpt.profiler.facts import OpFacts
from autockpt.profiler.rehearse import rehearse
from autockpt.profiler.subject import Subject
from autockpt.profiler.tensors import tensors_in

ROWS, WIDTH = 64, 256
BYTES = ROWS * WIDTH * 4


def facts_of(call: Any, *args: Any, written: tuple[int, ...] = (), **kwargs: Any) -> OpFacts:
    tensors = tensors_in((args, kwargs))
    with CpuMeter() as watch:
        rehearsal = rehearse(
            Subject(
                name="op",
                target="op",
                call=call,
                args=args,
                kwargs=kwargs,
                differentiable=frozenset(id(t) for t in tensors if t.is_floating_point()),
                written=frozenset(id(tensors[i]) for i in written),
            ),
            watch,
            Roofline(),
            timer=None,
            measured=True,
        )
    return rehearsal.finish(watch)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def test_relu_keeps_its_output_and_gelu_its_input(x: torch.Tensor) -> None:
    assert facts_of(F.relu, x).saved == (("result", 0),)
    assert facts_of(F.gelu, x).saved == (("argument", 0),)


def test_an_op_that_saves_inputs_only_is_not_run_where_a_recomputation_stops(
    x: torch.Tensor,
) -> None:
    linear = facts_of(F.linear, x, torch.randn(8, WIDTH))
    assert linear.packs
    assert linear.stop_cost == 0 == linear.stop_flops
    assert linear.flops == 2 * ROWS * WIDTH * 8
    relu = facts_of(F.relu, x)
    assert relu.stop_cost == relu.cost > 0


def test_dropout_keeps_a_hidden_mask_and_draws(x: torch.Tensor) -> None:
    dropout = facts_of(F.dropout, x, 0.1, True)
    assert dropout.hidden_bytes == (BYTES,)
    assert dropout.saved == (("hidden", 0),)
    assert dropout.random
    assert not facts_of(F.dropout, x, 0.0, True).random


def test_attention_is_random_only_with_dropout() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    assert not facts_of(F.scaled_dot_product_attention, q, k, v).random
    assert facts_of(F.scaled_dot_product_attention, q, k, v, dropout_p=0.1).random
    assert facts_of(F.scaled_dot_product_attention, q, k, v).flops == 2 * 2 * 8 * 16 * 16 * 8


def test_views_allocate_and_keep_nothing_and_hand_gradients_on(x: torch.Tensor) -> None:
    view = facts_of(torch.Tensor.view, x, 32, 512)
    assert view.results[0].storage == ("argument", 0)
    assert not view.packs
    assert view.fresh_gradient_bytes == ()
    assert view.gradients[0].source == ("result", 0)


def test_a_sum_hands_one_gradient_to_both(x: torch.Tensor) -> None:
    add = facts_of(torch.add, x, x.clone())
    assert [g.source for g in add.gradients] == [("result", 0), ("result", 0)]


def test_what_is_handed_on_unchanged_is_the_argument_itself(x: torch.Tensor) -> None:
    assert facts_of(torch.Tensor.contiguous, x).results[0].same_as == 0
    assert facts_of(torch.Tensor.contiguous, x.t()).results[0].same_as is None


def test_writing_in_place_leaves_the_real_argument_alone(x: torch.Tensor) -> None:
    before = x.clone()
    relu_ = facts_of(torch.relu_, x, written=(0,))
    assert torch.equal(x, before)
    assert relu_.results[0].storage == ("argument", 0)
    assert relu_.results[0].written == 0
    filled = facts_of(torch.Tensor.__setitem__, x, 0, torch.ones(WIDTH), written=(0,))
    assert torch.equal(x, before)
    assert not filled.results[0].returned
    assert len(filled.gradients) == 2


def test_a_loss_keeps_the_log_softmax_and_needs_room_for_one_more_in_backward(
    x: torch.Tensor,
) -> None:
    loss = facts_of(F.cross_entropy, x, torch.randint(0, WIDTH, (ROWS,)))
    assert BYTES in loss.hidden_bytes
    assert loss.fresh_gradient_bytes == (BYTES,)
    assert 0.9 * BYTES < loss.backward_workspace_bytes <= BYTES


def test_tensors_kept_as_attributes_of_a_custom_function_are_noticed(x: torch.Tensor) -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.value = value
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * 2

    assert facts_of(Keeps.apply, x).context == (("argument", 0),)


def test_backward_is_rehearsed_outside_autocast() -> None:
    def facts() -> OpFacts:
        q, k, v = (torch.randn(2, 4, 64, 16).bfloat16() for _ in range(3))
        return facts_of(F.scaled_dot_product_attention, q, k, v, None, 0.1)

    with torch.autocast("cpu", torch.bfloat16):
        inside = facts()
    assert inside.backward_workspace_bytes == facts().backward_workspace_bytes


def test_what_backward_makes_before_it_asks_for_what_is_saved() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).sum(0, keepdim=True).to(torch.bfloat16)

    x = torch.randn(ROWS, WIDTH)
    # The bfloat16 gradient of the sum has a float32 copy, and is let go of if it can be.
    facts = facts_of(halves, x)
    assert facts.early_backward_bytes == WIDTH * 4
    assert facts.early_backward_alone_bytes == WIDTH * (4 - 2)


def test_results_that_are_saved_are_let_go_of() -> None:
    with collector_off(), CpuMeter() as watch:
        watch.mark("start")
        for index in range(3):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            subject = Subject(
                name=f"{index}",
                target="softmax",
                call=torch.softmax,
                args=(x, -1),
                kwargs={},
                differentiable=frozenset({id(x)}),
                written=frozenset(),
            )
            rehearse(subject, watch, Roofline(), timer=None, measured=True)
        del x, subject
        watch.mark("stop")
    assert watch.span("start", "stop").end_bytes == 0
