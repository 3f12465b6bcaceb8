"""A model file at fault: one line with its file and line, exit code 2, and nothing left behind."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from autotune.space import check_request
from runtime.errors import ConfigError
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
        (GOOD + "raise SystemExit(3)\n", (), '`if __name__ == "__main__"`'),
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
        "sys.exit",
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


def test_a_choice_that_is_never_legal_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size must be an integer >= 1"):
        check_request(ranks=None, global_batch_size=None, fix={"micro_batch_size": "0"}, vary={})
    with pytest.raises(ConfigError, match="multiple of the ranks"):
        check_request(ranks=2, global_batch_size=7, fix={}, vary={})
    check_request(ranks=None, global_batch_size=None, fix={"micro_batch_size": "4"}, vary={})


def test_a_damaged_or_missing_study(tmp_path: Path) -> None:
    missing = run([*AUTOTUNE, "report", str(tmp_path)])
    (tmp_path / "study.db").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
    damaged = run([*AUTOTUNE, "report", str(tmp_path)])
    for done in (missing, damaged):
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("autotune: ")
        assert len(done.stderr.strip().splitlines()) <= 2
        assert "Traceback" not in done.stderr


def test_a_closed_standard_output_spoils_no_study(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(GOOD + "global_batch_size = 8\n")
    out = tmp_path / "out"
    command = shlex.join([*AUTOTUNE, "search", str(model), "--out", str(out), "--max-trials", "1"])
    done = run(["bash", "-c", f"{command} >&-"])
    assert done.returncode == 0, done.stderr
    assert (out / "study.db").read_bytes().startswith(b"SQLite format 3")
    assert (out / "best.json").exists()
