from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from autotune.profile import profile_model
from autotune.profile_job import relative_difference
from autotune.records import ModelProfile
from runtime.errors import ModelFileError, RunError
from runtime.launch import Launcher

MIB = 2**20
STUDIES = Path(__file__).parents[2] / "studies"
Profile = Callable[..., ModelProfile]

HEAD = """
import torch
from torch import nn

class Block(nn.Linear):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x).square().mean()

def build_model():
    return Net()

def make_batch(micro_batch_size):
    return torch.ones(micro_batch_size, 64)
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def profile(launcher: Launcher, tmp_path: Path) -> Profile:
    """Profile a model file made of `HEAD` and more source, which may redefine what it defines."""

    def run(
        source: str | Path = "", *, limit: int | None = 2**31, deadline: float = 60.0
    ) -> ModelProfile:
        path = tmp_path / "model.py"
        if isinstance(source, Path):
            path = source
        else:
            path.write_text(HEAD + textwrap.dedent(source))
        return profile_model(
            launcher, path, threads=1, memory_limit_bytes=limit, deadline_seconds=deadline
        )

    return run


def test_sizes_of_a_small_model(profile: Profile) -> None:
    found = profile("global_batch_size = 24\n")
    block, head = 64 * 64 + 64, 65
    assert found.parameter_count == found.trainable_parameter_count == 3 * block + head
    assert found.parameter_bytes == found.trainable_bytes == 4 * found.parameter_count
    assert (found.block_class, found.block_count) == ("Block", 3)
    assert (found.largest_block_bytes, found.root_bytes) == (4 * block, 4 * head)
    assert found.optimizer == "AdamW"
    # Two moments a parameter, and the steps' counters.
    assert 0 <= found.optimizer_state_bytes - 2 * found.parameter_bytes <= 64
    assert found.global_batch_size == 24
    assert found.tokens_per_sample is None
    assert found.halves_difference is not None
    assert found.halves_difference < 1e-5
    assert not found.stochastic
    assert found.micro_batch_seconds.keys() == found.activation_bytes.keys() == {1, 2}
    assert found.notes == ()


def test_the_gpt_study(profile: Profile) -> None:
    found = profile(STUDIES / "gpt" / "model.py")
    assert (found.block_class, found.block_count) == ("Block", 6)
    assert found.tokens_per_sample == 64
    assert found.parameter_bytes == found.root_bytes + 6 * found.largest_block_bytes
    one, two = found.activation_bytes[1], found.activation_bytes[2]
    assert 1.5 * one < two < 2.1 * one
    assert found.halves_difference is not None
    assert found.halves_difference < 1e-5


def test_batch_norm_depends_on_the_micro_batch_and_says_so(profile: Profile) -> None:
    found = profile(STUDIES / "convnet" / "model.py")
    assert found.block_class is None
    assert found.halves_difference is not None
    assert found.halves_difference > 1e-3
    assert any("depends on the micro-batch size" in note for note in found.notes)


def test_tied_and_frozen_parameters_count_once_and_apart(profile: Profile) -> None:
    found = profile(
        """
        def build_model():
            model = Net()
            model.blocks[1].weight = model.blocks[0].weight
            model.blocks[2].requires_grad_(False)
            model.register_buffer("mask", torch.ones(100))
            return model
        """
    )
    matrix, frozen = 64 * 64, 64 * 64 + 64
    assert found.parameter_count == 2 * matrix + 3 * 64 + 65
    assert found.parameter_count - found.trainable_parameter_count == frozen
    assert found.buffer_bytes == 400


@pytest.mark.parametrize(
    ("layer", "compared"), [("self.noise(x)", True), ("nn.functional.dropout(x)", False)]
)
def test_dropout_is_seen_and_taken_out_where_it_is_a_module(
    profile: Profile, layer: str, compared: bool
) -> None:
    found = profile(
        f"""
        class Noisy(Net):
            def __init__(self):
                super().__init__()
                self.noise = nn.Dropout(0.5)
            def forward(self, x):
                return super().forward({layer})
        def build_model():
            return Noisy()
        """
    )
    assert found.stochastic
    assert (found.halves_difference is not None) == compared
    assert any("is not known" in note for note in found.notes) != compared
    if found.halves_difference is not None:
        assert found.halves_difference < 1e-5


def test_a_model_that_needs_two_samples_is_profiled_at_two_and_four(profile: Profile) -> None:
    found = profile(
        """
        def build_model():
            return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), Net())
        """
    )
    assert found.activation_bytes.keys() == {2, 4}
    assert any("Expected more than 1 value per channel" in note for note in found.notes)


def test_a_model_beyond_the_limit_is_traced_and_agrees_with_a_real_run(profile: Profile) -> None:
    wide = """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(16))
            def forward(self, x):
                for block in self.blocks:
                    x = block(x).tanh()
                return x.square().mean()
        def make_batch(micro_batch_size):
            return torch.ones(micro_batch_size, 256, 1024)
        """
    traced, measured = profile(wide, limit=100 * MIB), profile(wide)
    assert any("does not fit the memory limit of 100 MiB" in note for note in traced.notes)
    assert measured.notes == ()
    assert traced.parameter_bytes == measured.parameter_bytes > 64 * MIB
    assert traced.optimizer_state_bytes == measured.optimizer_state_bytes
    assert traced.block_count == measured.block_count
    for size in (1, 2):
        expected = measured.activation_bytes[size]
        assert traced.activation_bytes[size] == pytest.approx(expected, rel=0.1)
    assert traced.micro_batch_seconds == {}


ERRORS = {
    "import": ("import nonexistent_module", "importing it raised ModuleNotFoundError"),
    "build_model": (
        "def build_model():\n    raise OSError('no weights')",
        "build_model() raised OSError: no weights",
    ),
    "make_batch at 2": (
        "def make_batch(size):\n    return [torch.ones(1, 64)][size - 1]",
        "make_batch(2) raised IndexError",
    ),
    "first dimension": (
        "def make_batch(size):\n    return torch.ones(3, 64)",
        "whose first dimension is the micro-batch size, 1, but got first dimensions [3]",
    ),
    "forward": (
        "def compute_loss(model, batch):\n    return model(batch[:, :7])",
        "the first step raised RuntimeError: mat1 and mat2",
    ),
    "not a scalar": (
        "def compute_loss(model, batch):\n    return model.head(batch[:2].expand(2, 64))",
        "must give a scalar loss, but got shape (2, 1)",
    ),
    "backward": (
        "def compute_loss(model, batch):\n    return model(batch).detach()",
        "compute_loss must give a loss that depends on a trainable parameter",
    ),
    "nan": (
        "def compute_loss(model, batch):\n    return model(batch) * float('nan')",
        "the loss of the first step must be finite, but got nan",
    ),
    "infinite gradient": (
        "def compute_loss(model, batch):\n    return (model(batch) * 0).sqrt()",
        "the gradient norm of the first step must be finite",
    ),
    "block classes": ("block_classes = (nn.Conv2d,)", "holds no Conv2d"),
}


@pytest.mark.parametrize(("source", "said"), ERRORS.values(), ids=ERRORS.keys())
def test_the_users_errors_name_the_file(profile: Profile, source: str, said: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        profile(source)
    assert said in str(caught.value)
    if "raised" in said:
        marks = ("import non", "raise ", "return [", "block(x).relu")
        guilty = [
            number
            for number, line in enumerate((HEAD + source).splitlines(), 1)
            if any(mark in line for mark in marks)
        ]
        assert f"model.py:{guilty[-1]}: " in str(caught.value)
        assert "Traceback" in caught.value.detail


def test_a_rank_that_dies_is_a_run_error(profile: Profile) -> None:
    with pytest.raises(RunError, match="SIGKILL"):
        profile("import os, signal\ndef build_model():\n    os.kill(os.getpid(), signal.SIGKILL)\n")


def test_a_model_that_hangs_ends_at_the_deadline(profile: Profile) -> None:
    with pytest.raises(RunError, match="did not finish"):
        profile("import time\ndef build_model():\n    time.sleep(60)\n", deadline=1.5)


def test_what_was_found_before_the_deadline_is_kept(profile: Profile) -> None:
    found = profile(
        """
        import time
        calls = []
        def compute_loss(model, batch):
            calls.append(batch)
            if len(calls) > 4:
                time.sleep(60)
            return model(batch)
        """,
        deadline=3.0,
    )
    assert found.activation_bytes.keys() == {1}
    assert any("before its last checks" in note for note in found.notes)


def test_neither_runs_nor_traces(profile: Profile) -> None:
    source = """
        def build_model():
            model = nn.Linear(8192, 2048)
            model.scale = float(model.weight.detach().square().mean().item())
            return model
        """
    with pytest.raises(RunError, match="cannot be built without memory"):
        profile(source, limit=32 * MIB)


def test_relative_difference_ignores_vanishing_gradients() -> None:
    whole = {"w": torch.ones(100), "b": torch.full((1,), 1e-7)}
    halves = {"w": torch.ones(100), "b": torch.full((1,), -1e-7)}
    assert relative_difference(whole, halves) < 1e-4
    halves["w"] = torch.full((100,), 1.01)
    assert relative_difference(whole, halves) == pytest.approx(0.01, rel=1e-3)
    assert relative_difference(whole, {}) == pytest.approx(1.0)
    assert relative_difference({"w": torch.zeros(2)}, {}) == 0.0
