"""Every way of sharing the work trains as one plain process does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.config import TrainConfig
from tests.runtime.engine_runs import plain_loop, train
from tests.runtime.models import SPECS
from tests.runtime.ranks import Ranks

STEPS = 5


def settings(**changes: Any) -> dict[str, Any]:
    base = {"ranks": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    return {**base, **changes}


def assert_same(ours: dict[str, Any], plain: dict[str, Any], rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=rtol)
    if plain["norms"]:
        np.testing.assert_allclose(ours["norms"], plain["norms"], rtol=rtol * 10)
    for name, value in plain["parameters"].items():
        np.testing.assert_allclose(
            ours["parameters"][name], value, rtol=rtol * 10, atol=rtol * 10, err_msg=name
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_trains_as_one_process(two_ranks: Ranks, name: str, stage: int) -> None:
    config = settings(zero_stage=stage)
    plain = plain_loop(name, TrainConfig(**config), STEPS)
    for ours in two_ranks.call(
        "tests.runtime.engine_runs:train", name=name, config=config, steps=STEPS
    ):
        assert_same(ours, plain)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_one_rank_trains_as_a_plain_loop(name: str) -> None:
    config = settings(ranks=1)
    plain = plain_loop(name, TrainConfig(**config), STEPS)
    assert_same(train(name, config, STEPS), plain)
