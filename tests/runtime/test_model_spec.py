from __future__ import annotations

import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from runtime.errors import ModelFileError
from runtime.model_spec import ModelSpec, load_model_spec, split_batch

GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
    def forward(self, x):
        return self.layer(x).square().mean()

def build_model():
    return Net()

def make_batch(micro_batch_size):
    return torch.randn(micro_batch_size, 3)
"""


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model file extends `sys.path`, as befits the only one of a rank."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def load(folder: Path, more: str = "", *, source: str = GOOD) -> ModelSpec:
    path = folder / "model.py"
    path.write_text(source + dedent(more))
    return load_model_spec(path)


def refused(folder: Path, more: str, *, source: str = GOOD) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        load(folder, more, source=source)
    return caught.value


def test_only_two_functions_are_needed(tmp_path: Path) -> None:
    spec = load(tmp_path)
    model = spec.build_model()
    loss = spec.compute_loss(model, spec.make_batch(4))
    assert loss.shape == ()
    assert loss.requires_grad
    optimizer = spec.build_optimizer(model)
    assert isinstance(optimizer, AdamW)
    assert len(optimizer.param_groups[0]["params"]) == 2
    assert spec.default_optimizer
    assert spec.global_batch_size is None
    assert spec.block_classes is None
    assert spec.path == tmp_path / "model.py"


def test_all_that_may_be_given_is_taken(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        """
        def compute_loss(model, batch): return model(batch)[None] * 2
        def build_optimizer(params): return torch.optim.SGD(params, lr=0.5)
        global_batch_size = 48
        block_classes = (Net, nn.Linear)
        """,
    )
    model, batch = spec.build_model(), spec.make_batch(2)
    assert spec.compute_loss(model, batch).shape == ()
    torch.testing.assert_close(spec.compute_loss(model, batch), 2 * model(batch))
    assert isinstance(spec.build_optimizer(model), SGD)
    assert not spec.default_optimizer
    assert spec.global_batch_size == 48
    assert spec.block_classes == (type(model), nn.Linear)


@pytest.mark.parametrize(("argument", "met"), [("model", "Net"), ("params", "list")])
def test_the_optimizer_takes_the_model_or_its_parameters(
    tmp_path: Path, argument: str, met: str
) -> None:
    spec = load(
        tmp_path,
        f"""
        def build_optimizer({argument}):
            assert type({argument}).__name__ == {met!r}
            return torch.optim.SGD(build_model().parameters(), lr=1)
        """,
    )
    assert isinstance(spec.build_optimizer(spec.build_model()), SGD)


def test_the_default_optimizer_leaves_frozen_parameters_alone(tmp_path: Path) -> None:
    spec = load(tmp_path)
    model = spec.build_model()
    next(model.parameters()).requires_grad_(False)
    assert len(spec.build_optimizer(model).param_groups[0]["params"]) == 1


def test_an_edit_is_seen_whatever_its_time_and_size(tmp_path: Path) -> None:
    first = load(tmp_path, "global_batch_size = 16")
    stamp = os.stat(first.path)
    first.path.write_text(first.path.read_text().replace("16", "32"))
    os.utime(first.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert first.global_batch_size == 16
    assert load_model_spec(first.path).global_batch_size == 32


def test_nothing_is_written_beside_the_file(tmp_path: Path) -> None:
    load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


def test_modules_beside_the_file_and_dataclasses_work(tmp_path: Path) -> None:
    (tmp_path / "helper_beside.py").write_text("size = 24")
    spec = load(
        tmp_path,
        """
        from dataclasses import dataclass
        import helper_beside
        @dataclass
        class Sizes:
            batch: "int" = helper_beside.size
        global_batch_size = Sizes().batch
        """,
    )
    assert spec.global_batch_size == 24


def test_our_own_future_imports_are_not_the_files(tmp_path: Path) -> None:
    more = "def annotated(x: int): ...\nassert annotated.__annotations__ == {'x': int}"
    load(tmp_path, more)


def test_a_relative_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_model_spec(Path("model.py")).path == tmp_path / "model.py"


def test_a_required_name_that_cannot_be_called(tmp_path: Path) -> None:
    error = refused(tmp_path, "make_batch = 3")
    assert str(error) == (
        f"{tmp_path}/model.py must define make_batch(micro_batch_size), "
        f"but it defines build_model()"
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("raise ValueError('no data')", "ValueError: no data"),
        ("import no_such_module_here", "ModuleNotFoundError: No module named"),
        ("raise SystemExit('stop')", "SystemExit: stop"),
    ],
)
def test_a_file_that_raises_on_import(tmp_path: Path, more: str, said: str) -> None:
    error = refused(tmp_path, more)
    line = len((GOOD + more).splitlines())
    assert str(error).startswith(f"{tmp_path}/model.py:{line}: importing it raised {said}")
    assert more in error.detail


def test_an_error_in_a_module_beside_the_file_is_placed_there(tmp_path: Path) -> None:
    (tmp_path / "helper_that_raises.py").write_text("x = 1\ny = x / 0\n")
    error = refused(tmp_path, "import helper_that_raises")
    assert str(error).startswith(f"{tmp_path}/helper_that_raises.py:2: importing it raised Zero")


def test_build_model_raises(tmp_path: Path) -> None:
    spec = load(tmp_path, "def build_model():\n    return Net(7)")
    with pytest.raises(ModelFileError) as caught:
        spec.build_model()
    line = len(spec.path.read_text().splitlines())
    assert str(caught.value).startswith(f"{spec.path}:{line}: build_model() raised TypeError: ")
    assert "Net(7)" in caught.value.detail


def test_build_model_returns_something_else(tmp_path: Path) -> None:
    spec = load(tmp_path, "def build_model(): return Net")
    with pytest.raises(ModelFileError, match=r"must return an nn\.Module, but got type"):
        spec.build_model()


def test_make_batch_raises_for_some_sizes(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        """
        def make_batch(micro_batch_size):
            if micro_batch_size > 1:
                raise NotImplementedError("one at a time")
            return torch.randn(1, 3)
        """,
    )
    assert spec.make_batch(1).shape == (1, 3)
    with pytest.raises(ModelFileError) as caught:
        spec.make_batch(2)
    assert "make_batch(2) raised NotImplementedError: one at a time" in str(caught.value)
    assert str(caught.value).startswith(f"{spec.path}:")


@pytest.mark.parametrize(
    ("batch", "met"),
    [
        ("torch.randn(3, micro_batch_size)", "first dimensions [3]"),
        ("{'x': torch.randn(5, 3), 'y': torch.randn(6), 'z': torch.ones(())}", "[5, 6]"),
        ("['text'] * micro_batch_size", "no tensor"),
        ("None", "no tensor"),
    ],
)
def test_a_batch_of_another_first_dimension(tmp_path: Path, batch: str, met: str) -> None:
    spec = load(tmp_path, f"def make_batch(micro_batch_size): return {batch}")
    with pytest.raises(ModelFileError) as caught:
        spec.make_batch(4)
    message = str(caught.value)
    assert message.startswith(f"{spec.path}: make_batch(4) must return tensors whose first")
    assert "the micro-batch size, 4, but got" in message
    assert message.endswith(met)


def test_a_mapping_that_is_no_dict_becomes_one(tmp_path: Path) -> None:
    more = "from collections import UserDict\n"
    more += "def make_batch(n): return UserDict(x=torch.ones(n, 3), names=['a'] * n)"
    spec = load(tmp_path, more)
    batch = spec.make_batch(4)
    assert type(batch) is dict
    assert split_batch(batch, 4, 2)[1]["x"].shape == (2, 3)


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (
            "def compute_loss(model, batch): return batch.sum(1) * model(batch)",
            "compute_loss must give a scalar loss, but got shape (4,)",
        ),
        (
            "def compute_loss(model, batch): return model(batch).item()",
            "compute_loss must give a scalar loss, but got float",
        ),
        (
            "def compute_loss(model, batch): return model(batch).detach()",
            "compute_loss must give a loss that depends on a trainable parameter",
        ),
        (
            "Net.forward = lambda self, x: self.layer(x)",
            "the model's output must give a scalar loss, but got shape (4, 1); define compute_loss",
        ),
        (
            "Net.forward = lambda self, x: {'logits': self.layer(x)}",
            "the model's output must give a scalar loss, but got NoneType; define compute_loss",
        ),
        (
            "Net.forward = lambda self, x: 'loss'",
            "the model's output must give a scalar loss, but got NoneType; define compute_loss",
        ),
    ],
)
def test_a_loss_that_is_none(tmp_path: Path, more: str, rule: str) -> None:
    spec = load(tmp_path, more)
    with pytest.raises(ModelFileError) as caught:
        spec.compute_loss(spec.build_model(), spec.make_batch(4))
    assert str(caught.value).startswith(f"{spec.path}: {rule}")


def test_a_loss_without_gradient_is_fine_where_none_is_asked(tmp_path: Path) -> None:
    spec = load(tmp_path)
    with torch.no_grad():
        assert not spec.compute_loss(spec.build_model(), spec.make_batch(4)).requires_grad


@pytest.mark.parametrize(
    "output",
    [
        "{'loss': loss, 'logits': x}",
        "SimpleNamespace(loss=loss)",
        "(loss, x)",
        "[loss]",
        "loss",
        "loss.reshape(1, 1)",
    ],
)
def test_the_loss_is_found_in_the_output(tmp_path: Path, output: str) -> None:
    spec = load(
        tmp_path,
        f"""
        from types import SimpleNamespace
        def forward(self, x):
            loss = self.layer(x).mean()
            return {output}
        Net.forward = forward
        """,
    )
    model, batch = spec.build_model(), spec.make_batch(4)
    torch.testing.assert_close(spec.compute_loss(model, batch), model.layer(batch).mean())


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ("def build_optimizer(params): return 'adam'", "must return a torch.optim.Optimizer"),
        ("def build_optimizer(params): raise OSError('no')", "raised OSError: no"),
        ("def build_optimizer(): return None", "build_optimizer(params) raised TypeError"),
    ],
)
def test_an_optimizer_that_is_none(tmp_path: Path, more: str, rule: str) -> None:
    spec = load(tmp_path, more)
    with pytest.raises(ModelFileError) as caught:
        spec.build_optimizer(spec.build_model())
    assert rule in str(caught.value)
    assert str(spec.path) in str(caught.value)


def test_a_model_without_trainable_parameters(tmp_path: Path) -> None:
    spec = load(tmp_path, "def build_model(): return nn.ReLU()")
    with pytest.raises(ModelFileError, match="must have a trainable parameter"):
        spec.build_optimizer(spec.build_model())


@pytest.mark.parametrize("value", ["0", "-4", "16.0", "True", "'64'"])
def test_a_wrong_global_batch_size(tmp_path: Path, value: str) -> None:
    error = refused(tmp_path, f"global_batch_size = {value}")
    assert str(error) == (
        f"{tmp_path}/model.py: global_batch_size must be an integer >= 1, but got {value}"
    )


@pytest.mark.parametrize("value", ["'Net'", "('Net',)", "(Net(),)", "(int,)", "Net()"])
def test_wrong_block_classes(tmp_path: Path, value: str) -> None:
    error = refused(tmp_path, f"block_classes = {value}")
    assert "block_classes must be a tuple of nn.Module classes, but got" in str(error)


def test_a_single_block_class_needs_no_tuple(tmp_path: Path) -> None:
    spec = load(tmp_path, "block_classes = nn.Linear")
    assert spec.block_classes == (nn.Linear,)


def test_want_of_memory_is_no_error_of_the_file(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        """
        def build_model(): raise MemoryError
        def make_batch(n): return torch.empty(n, 2**55)
        """,
    )
    with pytest.raises(MemoryError):
        spec.build_model()
    with pytest.raises(RuntimeError, match="allocate memory"):
        spec.make_batch(1)
