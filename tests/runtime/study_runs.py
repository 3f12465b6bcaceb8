"""The example models of `studies/`, for the runs of `tests.runtime.engine_runs`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from runtime.config import TrainConfig
from runtime.model_spec import load_model_spec
from tests.runtime import engine_runs
from tests.runtime.models import SPECS

STUDIES = Path(__file__).resolve().parents[2] / "studies"
NAMES = ("convnet", "gpt", "seq2seq")


def register() -> None:
    """Make each study known to `engine_runs`, as `study:NAME`."""
    for name in NAMES:
        SPECS[f"study:{name}"] = partial(load_model_spec, STUDIES / name / "model.py")


def train(name: str, config: dict[str, Any], steps: int) -> list[float]:
    """Losses of `steps` optimizer steps in this rank's group."""
    register()
    losses: list[float] = engine_runs.train(f"study:{name}", config, steps)["losses"]
    return losses


def plain(name: str, config: dict[str, Any], steps: int) -> list[float]:
    """Losses of plain single-process PyTorch, in fp32, over the same micro-batches."""
    register()
    result = engine_runs.plain_loop(f"study:{name}", TrainConfig(**config), steps)
    losses: list[float] = result["losses"]
    return losses
