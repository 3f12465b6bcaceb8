"""A model file at fault: one line with its file and line, exit code 2, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.commands import AUTOTUNE, run

GOOD = """\
import torch
from torch import nn
def build_model(): return nn.Linear(8, 1)
def make_batch(n): return torch.randn(n, 8)
def compute_loss(model, batch): return model(batch).square().mean()
"""
BROKEN = """\
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient): raise RuntimeError("broken backward")
"""


def _model(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (_model("import torch\n", "raise ValueError('boom')\n"), (), "model.py:1: importing it"),
        (
            _model("return nn.Linear(8, 1)", "raise KeyError('in build')"),
            (),
            "model.py:3: build_model() raised KeyError",
        ),
        (
            _model("return torch.randn(n, 8)", "return torch.randn(n, 8) if n == 1 else 1 / 0"),
            (),
            "model.py:4: make_batch(2) raised ZeroDivisionError",
        ),
        (_model("torch.randn(n, 8)", "torch.randn(8, n)"), (), "first dimension"),
        (_model(".square().mean()", ".square()"), (), "scalar loss"),
        (_model(".mean()", ".mean() * float('nan')"), (), "must be finite, but got nan"),
        (
            _model("def build", BROKEN + "def build").replace(
                "model(batch)", "Broken.apply(model(batch))"
            ),
            (),
            "raised RuntimeError: broken backward",
        ),
        (GOOD, ("--global-batch-size", "7", "--ranks", "2"), "use 6 or 8"),
        (GOOD, ("--fix", "zero=3"), "the dimensions are zero_stage"),
        (GOOD, ("--ranks", "2", "--fix", "zero_stage=9"), "must be one of 0, 1, 2, 3"),
    ],
    ids=[
        "import",
        "build_model",
        "make_batch",
        "first dimension",
        "scalar",
        "nan",
        "backward",
        "global batch",
        "unknown dimension",
        "unknown value",
    ],
)
def test_is_refused_in_one_line(
    tmp_path: Path, source: str, options: tuple[str, ...], message: str
) -> None:
    model = tmp_path / "model.py"
    model.write_text(source)
    out = tmp_path / "studies" / "mine"
    done = run([*AUTOTUNE, "search", str(model), "--out", str(out), *options])
    assert done.returncode == 2, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("autotune: ")]
    assert len(error) == 1
    assert message in error[0]
    assert "Traceback" not in done.stderr
    assert not out.parent.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.py"]
