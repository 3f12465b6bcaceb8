"""The example models train alike under every stage, checkpointing and split, on two ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest

from tests.runtime import study_runs
from tests.runtime.engine_runs import settings
from tests.runtime.ranks import Ranks

STEPS = 5
TRAIN = "tests.runtime.study_runs:train"
_QUICK = [(0, "none"), (1, "full"), (2, "none"), (3, "selective")]
TOLERANCE = {"bf16": 2e-2, "fp16": 5e-3}
"""Largest relative distance of a loss from that of fp32, over `STEPS` steps."""


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("autotune_user_model", None)


@cache
def _plain(
    name: str, micro_batch_size: int = 2, gradient_accumulation_steps: int = 2
) -> tuple[float, ...]:
    config = settings(
        micro_batch_size=micro_batch_size, gradient_accumulation_steps=gradient_accumulation_steps
    )
    return tuple(study_runs.plain(name, config, STEPS))


def _train(two_ranks: Ranks, name: str, **changes: object) -> list[float]:
    losses: list[float] = two_ranks.call(TRAIN, name=name, config=settings(**changes), steps=STEPS)[
        0
    ]
    return losses


def _slow_where(condition: bool, *values: object) -> object:
    """The GPT takes seconds a run: what its other runs nearly cover is left to `make test-all`."""
    return pytest.param(*values, marks=[pytest.mark.slow] if condition else [])


@pytest.mark.parametrize(
    ("name", "stage", "checkpointing"),
    [
        _slow_where(name == "gpt" and (stage, checkpointing) not in _QUICK, *case)
        for case in product(study_runs.NAMES, range(4), ("none", "selective", "full"))
        for name, stage, checkpointing in [case]
    ],
)
def test_stages_and_checkpointing(
    two_ranks: Ranks, name: str, stage: int, checkpointing: str
) -> None:
    losses = _train(two_ranks, name, zero_stage=stage, activation_checkpointing=checkpointing)
    np.testing.assert_allclose(losses, _plain(name), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "stage", "split"),
    [
        _slow_where(name == "gpt" and (stage, split) != (1, (1, 4)), *case)
        for case in product(("gpt", "seq2seq"), range(4), ((1, 4), (4, 1)))
        for name, stage, split in [case]
    ],
)
def test_splits_of_one_global_batch(
    two_ranks: Ranks, name: str, stage: int, split: tuple[int, int]
) -> None:
    size, steps = split
    losses = _train(
        two_ranks,
        name,
        zero_stage=stage,
        micro_batch_size=size,
        gradient_accumulation_steps=steps,
    )
    np.testing.assert_allclose(losses, _plain(name), rtol=1e-5)


def test_batch_norm_depends_on_the_split() -> None:
    whole = _plain("convnet", micro_batch_size=4, gradient_accumulation_steps=1)
    parts = _plain("convnet", micro_batch_size=1, gradient_accumulation_steps=4)
    assert np.abs(np.subtract(whole, parts) / whole).max() > 1e-4


@pytest.mark.parametrize(
    ("name", "stage", "precision"),
    [
        _slow_where(name == "gpt" and stage == 0, *case)
        for case in product(study_runs.NAMES, (0, 3), ("bf16", "fp16"))
        for name, stage, precision in [case]
        # A convolution in fp16 takes seconds on CPU.
        if (name, precision) != ("convnet", "fp16")
    ],
)
def test_reduced_precision_stays_close(
    two_ranks: Ranks, name: str, stage: int, precision: str
) -> None:
    losses = _train(two_ranks, name, zero_stage=stage, precision=precision)
    np.testing.assert_allclose(losses, _plain(name), rtol=TOLERANCE[precision])
