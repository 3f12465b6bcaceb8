"""Every way of sharing the work trains as one plain process does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from runtime.config import TrainConfig
from runtime.engine import create_engine
from runtime.errors import ConfigError, UnsupportedModelError
from tests.runtime.engine_contract import check_contract
from tests.runtime.engine_runs import CPU, assert_same, plain_loop, settings, train
from tests.runtime.models import SPECS, make_spec, tokens
from tests.runtime.ranks import RankError, Ranks

STEPS = 5
TRAIN = "tests.runtime.engine_runs:train"
CONTRACT = "tests.runtime.engine_contract:check_contract"
CREATE = "runtime.engine:create_engine"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_trains_as_one_process(two_ranks: Ranks, name: str, stage: int) -> None:
    config = settings(zero_stage=stage)
    plain = plain_loop(name, TrainConfig(**config), STEPS)
    for ours in two_ranks.call(TRAIN, name=name, config=config, steps=STEPS):
        assert_same(ours, plain)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_one_rank_trains_as_a_plain_loop(name: str) -> None:
    config = settings(ranks=1)
    plain = plain_loop(name, TrainConfig(**config), STEPS)
    assert_same(train(name, config, STEPS), plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_contract(two_ranks: Ranks, stage: int) -> None:
    two_ranks.call(CONTRACT, create=CREATE, config=settings(zero_stage=stage))


def test_contract_of_one_rank() -> None:
    check_contract(CREATE, settings(ranks=1, gradient_clipping=None))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("size", "steps"), [(8, 1), (4, 2), (1, 8)])
def test_any_split_of_the_global_batch_trains_alike(
    two_ranks: Ranks, stage: int, size: int, steps: int
) -> None:
    config = settings(zero_stage=stage, micro_batch_size=size, gradient_accumulation_steps=steps)
    whole = settings(ranks=1, micro_batch_size=16, gradient_accumulation_steps=1)
    plain = plain_loop("gpt", TrainConfig(**whole), STEPS)
    assert_same(two_ranks.call(TRAIN, name="gpt", config=config, steps=STEPS)[0], plain)


@pytest.mark.parametrize("stage", [0, 3])
def test_no_clipping_gives_no_norm(two_ranks: Ranks, stage: int) -> None:
    config = settings(zero_stage=stage, gradient_clipping=None)
    plain = plain_loop("gpt", TrainConfig(**config), STEPS)
    ours = two_ranks.call(TRAIN, name="gpt", config=config, steps=STEPS)[0]
    assert ours["norms"] == [None] * STEPS
    assert_same({**ours, "norms": []}, plain)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_that_change_become_those_of_rank_0(two_ranks: Ranks, stage: int) -> None:
    first, second = two_ranks.call(
        TRAIN, name="conv", config=settings(zero_stage=stage), steps=STEPS
    )
    assert first["buffers"] == second["buffers"]
    assert first["buffers"]["norm.num_batches_tracked"] == STEPS * 2


def test_seeds_differ_between_ranks_after_the_build(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("tests.runtime.engine_runs:random_numbers", config=settings())
    assert first != second


def test_ranks_must_match_the_processes() -> None:
    with pytest.raises(ConfigError, match="number of processes that run, 1, but got 2"):
        create_engine(SPECS["gpt"](), TrainConfig(ranks=2), CPU)


def test_a_model_that_differs_between_ranks_is_refused(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="must build the same model on every rank") as caught:
        two_ranks.call("tests.runtime.engine_runs:build_by_rank", config=settings(zero_stage=1))
    assert caught.value.kind == "UnsupportedModelError"


def test_sparse_gradients_are_refused_by_module() -> None:
    spec = make_spec(lambda: torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True)), tokens)
    with pytest.raises(UnsupportedModelError, match="module '0' must not give sparse gradients"):
        create_engine(spec, TrainConfig(), CPU)


def test_generation_caches_are_off() -> None:
    class Settings:
        use_cache = True

    kept: dict[str, Any] = {}

    def build() -> torch.nn.Module:
        kept["model"] = SPECS["gpt"]().build_model()
        kept["model"].config = Settings()
        return kept["model"]

    create_engine(make_spec(build, tokens), TrainConfig(), CPU)
    assert kept["model"].config.use_cache is False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stage", "checkpointing"), [(0, "none"), (1, "selective"), (3, "full")])
def test_compiled_blocks_train_alike(two_ranks: Ranks, stage: int, checkpointing: str) -> None:
    config = settings(zero_stage=stage, compile=True, activation_checkpointing=checkpointing)
    for name in ("gpt", "conv"):
        plain = plain_loop(name, TrainConfig(**config), STEPS)
        ours = two_ranks.call(TRAIN, seconds=250, name=name, config=config, steps=STEPS)[0]
        np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_cuda_device(precision: str) -> None:
    config = settings(ranks=1, precision=precision)
    plain = plain_loop("gpt", TrainConfig(**config), STEPS)
    ours = train("gpt", config, STEPS, device="cuda")
    np.testing.assert_allclose(ours["losses"][0], plain["losses"][0], rtol=2e-2)
