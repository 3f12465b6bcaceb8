"""Clipping of shards, and optimizers on shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from runtime.optim import clip_gradients, separate_shards
from tests.runtime.engine_runs import refusal, settings, train_with
from tests.runtime.optimizers import OPTIMIZERS
from tests.runtime.ranks import Ranks


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_shards_is_clipping_the_whole(two_ranks: Ranks, max_norm: float) -> None:
    for result in two_ranks.call("tests.runtime.engine_runs:clip_mixed", max_norm=max_norm):
        ours, theirs = result["norms"]
        assert ours == pytest.approx(theirs, rel=1e-6)
        for our_gradient, their_gradient in result["gradients"]:
            np.testing.assert_allclose(our_gradient, their_gradient, rtol=1e-5)


def test_clipping_several_dtypes() -> None:
    parameters = [
        nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.float64)
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = clip_gradients(parameters, 1.0)
    assert norm.item() == pytest.approx((8 * 9) ** 0.5)
    total = sum(item.grad.double().square().sum() for item in parameters) ** 0.5
    assert total.item() == pytest.approx(1.0, rel=1e-5)


def test_optimizers_that_cannot_step_on_shards_are_refused(two_ranks: Ranks) -> None:
    names = list(OPTIMIZERS)
    first, second = two_ranks.call("tests.runtime.engine_runs:check_optimizers", names=names)
    assert first == second
    refused = {name for name, message in first.items() if message}
    assert refused >= {"Adafactor", "LBFGS", "Flattening", "LocalNorm", "Adagrad fused"}
    assert not refused & {"SGD", "Adam foreach", "RMSprop", "decay groups", "Sign", "TrustRatio"}
    assert "optimizer LBFGS must step without a closure" in first["LBFGS"]
    for name in ("Adafactor", "Flattening", "LocalNorm"):
        assert first[name].startswith(f"optimizer {name} cannot step on shards"), first[name]
        assert "\n" not in first[name]


def test_whole_parameters_take_any_optimizer_without_a_closure() -> None:
    refused = {name for name, build in OPTIMIZERS.items() if refusal(build, sharded=False)}
    assert refused == {"LBFGS"}


@pytest.mark.parametrize("name", ["SGD", "Adam foreach", "RMSprop", "decay groups", "TrustRatio"])
def test_accepted_optimizers_train_alike_on_shards(two_ranks: Ranks, name: str) -> None:
    plain = train_with(name, settings(ranks=1, gradient_accumulation_steps=4), 5)
    for stage in (1, 3):
        ours = two_ranks.call(
            "tests.runtime.engine_runs:train_with",
            optimizer=name,
            config=settings(zero_stage=stage),
            steps=5,
        )[0]
        np.testing.assert_allclose(ours, plain, rtol=1e-5)


def test_groups_of_whole_tensors_stay_as_they_are() -> None:
    optimizer = OPTIMIZERS["decay groups"](nn.Linear(2, 2))
    separate_shards(optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
