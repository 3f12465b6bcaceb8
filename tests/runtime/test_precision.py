"""Lowered precisions stay close to fp32, and skip what is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.config import Precision, TrainConfig
from runtime.precision import autocast, lower_inputs, lowered_dtype, shard_policy
from tests.runtime.engine_runs import CPU, plain_loop, settings, train
from tests.runtime.ranks import Ranks

STEPS = 5
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3}
"""Largest relative distance from the fp32 losses; bf16 keeps 8 bits of a number, fp16 11."""


@pytest.mark.parametrize(
    ("stage", "precision", "reduce_dtype"),
    [
        *((stage, "bf16", "fp32") for stage in (0, 1, 2, 3)),
        *((stage, "bf16", "compute") for stage in (0, 1, 3)),
        *((stage, "fp16", "fp32") for stage in (0, 1, 3)),
        *((stage, "fp16", "compute") for stage in (0, 2)),
    ],
)
def test_trains_close_to_fp32(
    two_ranks: Ranks, stage: int, precision: str, reduce_dtype: str
) -> None:
    config = settings(zero_stage=stage, precision=precision, reduce_dtype=reduce_dtype)
    plain = plain_loop("scaled", TrainConfig(**config), STEPS)
    ours = two_ranks.call(
        "tests.runtime.engine_runs:train", name="scaled", config=config, steps=STEPS
    )[0]
    assert ours["skipped"] == 0
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=TOLERANCE[precision])
    np.testing.assert_allclose(ours["norms"], plain["norms"], rtol=5e-2)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("name", ["conv", "mixed", "moe", "method"])
def test_bf16_on_models_that_break(two_ranks: Ranks, name: str, stage: int) -> None:
    """Batch norms, experts, idle parameters, blocks that mix dtypes, a loss outside forward."""
    config = settings(zero_stage=stage, precision="bf16")
    plain = plain_loop(name, TrainConfig(**config), STEPS)
    ours = two_ranks.call("tests.runtime.engine_runs:train", name=name, config=config, steps=STEPS)[
        0
    ]
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=TOLERANCE["bf16"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_rank_trains_close_to_fp32(precision: str) -> None:
    config = settings(ranks=1, precision=precision)
    plain = plain_loop("seq2seq", TrainConfig(**config), STEPS)
    ours = train("seq2seq", config, STEPS)
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=TOLERANCE[precision])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(
    two_ranks: Ranks, stage: int
) -> None:
    results = two_ranks.call(
        "tests.runtime.engine_runs:overflow_on_rank_1",
        config=settings(zero_stage=stage, precision="fp16"),
    )
    for result in results:
        assert result["skipped"] == [False, True, False]
        assert result["moved"] == [True, False, True]
        assert result["scales"] == [65536.0, 32768.0, 32768.0]
        assert result["norms"][1] is None


def test_lowered_dtype() -> None:
    pairs: list[tuple[Precision, Any]] = [
        ("fp32", None),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ]
    for precision, dtype in pairs:
        assert lowered_dtype(precision) == dtype
        with autocast(precision, CPU):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == (dtype or torch.float32)


@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "expected"),
    [
        ("fp32", "compute", (None, None)),
        ("bf16", "fp32", (torch.bfloat16, torch.float32)),
        ("fp16", "compute", (torch.float16, torch.float16)),
    ],
)
def test_shard_policy(precision: str, reduce_dtype: str, expected: tuple[Any, Any]) -> None:
    config = TrainConfig.model_validate({"precision": precision, "reduce_dtype": reduce_dtype})
    policy = shard_policy(config)
    assert (policy.param_dtype, policy.reduce_dtype) == expected
    assert not policy.cast_forward_inputs


def test_lowered_inputs_keep_masks_finite_and_integers_as_they_are() -> None:
    seen: dict[str, Any] = {}

    def forward(x: torch.Tensor, *, mask: torch.Tensor, ids: torch.Tensor, name: str) -> None:
        seen.update(x=x, mask=mask, ids=ids, name=name, autocast=torch.is_autocast_enabled("cpu"))

    x = torch.ones(2, requires_grad=True)
    mask = torch.full((2,), torch.finfo(torch.float32).min)
    with autocast("fp16", CPU):
        lower_inputs(forward, torch.float16, CPU)(x, mask=mask, ids=torch.tensor([3]), name="a")
    assert seen["x"].dtype == torch.float16
    assert seen["x"].requires_grad
    assert seen["mask"].isfinite().all()
    assert seen["ids"].dtype == torch.int64
    assert (seen["name"], seen["autocast"]) == ("a", False)
