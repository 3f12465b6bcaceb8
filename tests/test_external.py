"""Models that nobody here wrote: each takes a model file of a few lines."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from runtime.model_spec import load_model_spec, split_batch

MODELS = sorted((Path(__file__).parent / "external").glob("*.py"))


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_there_are_three() -> None:
    assert len(MODELS) >= 3


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_loads_and_trains(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 25
    torch.manual_seed(0)
    spec = load_model_spec(path)
    model, batch = spec.build_model(), spec.make_batch(4)
    optimizer = spec.build_optimizer(model)
    losses = []
    for _ in range(2):
        for part in split_batch(batch, 4, 2):
            loss = spec.compute_loss(model, part)
            (loss / 2).backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(math.log(512), rel=0.3)
    assert losses[1] < losses[0]
