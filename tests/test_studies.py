"""The example models do what their files say: they load, learn, and split as a search needs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runtime.meter import tokens_per_sample
from runtime.model_spec import Batch, ModelSpec, load_model_spec, split_batch

STUDIES = Path(__file__).resolve().parent.parent / "studies"
NAMES = ("gpt", "convnet", "seq2seq")
LoadStudy = Callable[[str], tuple[ModelSpec, ModuleType]]


@pytest.fixture
def load_study(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadStudy]:
    """The checked functions of a study, and its module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a shared machine several wait for each other

    def load(name: str) -> tuple[ModelSpec, ModuleType]:
        spec = load_model_spec(STUDIES / name / "model.py")
        return spec, sys.modules["autotune_user_model"]

    yield load
    torch.set_num_threads(threads)


def gradients(spec: ModelSpec, model: nn.Module, batches: list[Batch]) -> list[Tensor]:
    """Those of the mean loss over `batches`."""
    model.zero_grad()
    for batch in batches:
        (spec.compute_loss(model, batch) / len(batches)).backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Relative to the largest gradient."""
    scale = max(float(tensor.abs().max()) for tensor in first)
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)) / scale


@pytest.mark.parametrize(
    ("name", "classes", "millions", "tokens"),
    [("gpt", 256, 10.8, 64), ("convnet", 12, 0.39, None), ("seq2seq", 501, 3.2, 32)],
)
def test_starts_from_an_even_guess(
    load_study: LoadStudy, name: str, classes: int, millions: float, tokens: int | None
) -> None:
    spec, _ = load_study(name)
    model, batch = spec.build_model(), spec.make_batch(8)
    assert spec.compute_loss(model, batch).item() == pytest.approx(math.log(classes), rel=0.1)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.01)
    assert tokens_per_sample(batch, 8) == tokens


@pytest.mark.parametrize(("name", "steps", "share"), [("gpt", 8, 0.75), ("convnet", 20, 0.8)])
def test_learns(load_study: LoadStudy, name: str, steps: int, share: float) -> None:
    spec, _ = load_study(name)
    model = spec.build_model()
    optimizer = spec.build_optimizer(model)
    losses = []
    for _ in range(steps):
        loss = spec.compute_loss(model, spec.make_batch(16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < share * losses[0], losses


def test_seq2seq_learns_its_samples_by_heart(load_study: LoadStudy) -> None:
    """Sorting itself takes some hundred steps."""
    spec, _ = load_study("seq2seq")
    model, batch = spec.build_model(), spec.make_batch(4)
    optimizer = spec.build_optimizer(model)
    first = spec.compute_loss(model, batch).item()
    for _ in range(30):
        spec.compute_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert spec.compute_loss(model, batch).item() < 0.7 * first


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_batch_and_of_its_parts(load_study: LoadStudy, name: str) -> None:
    """Equal for a mean over samples; BatchNorm normalizes each part by itself."""
    spec, _ = load_study(name)
    model, batch = spec.build_model(), spec.make_batch(8)
    whole = gradients(spec, model, [batch])
    difference = largest_difference(whole, gradients(spec, model, split_batch(batch, 8, 4)))
    if name == "convnet":
        assert difference > 1e-3
    else:
        assert difference < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_batches_follow_the_seed(load_study: LoadStudy, name: str) -> None:
    spec, _ = load_study(name)

    def leaves(seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return tree_leaves(spec.make_batch(3))

    assert all(torch.equal(a, b) for a, b in zip(leaves(1), leaves(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(leaves(1), leaves(2), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_dataset(load_study: LoadStudy, name: str) -> None:
    spec, module = load_study(name)
    train, held_out = module.build_dataset(), module.build_dataset("held_out")
    assert len(train) > 4 * len(held_out) > 10_000
    for dataset in (train, held_out):
        for index in (0, len(dataset) - 1):
            torch.testing.assert_close(dataset[index], dataset[index], rtol=0, atol=0)
    sample = tree_leaves(train[0])
    batch = tree_leaves(spec.make_batch(2))
    assert [torch.as_tensor(leaf).shape for leaf in sample] == [leaf.shape[1:] for leaf in batch]


def test_gpt_sees_only_what_came_before(load_study: LoadStudy) -> None:
    spec, _ = load_study("gpt")
    model = spec.build_model()
    tokens, next_tokens = spec.make_batch(1)
    assert torch.equal(tokens[:, 1:], next_tokens[:, :-1])
    changed = tokens.clone()
    changed[0, 40:] = 7
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_gpt_reads_english(load_study: LoadStudy) -> None:
    _, module = load_study("gpt")
    text = bytes(module.build_dataset().tokens.tolist()).decode()
    assert text.count(" the ") > 1000
    held_out = bytes(module.build_dataset("held_out").tokens.tolist()).decode()
    assert held_out[:200] not in text


def test_gpt_decays_matrices_only(load_study: LoadStudy) -> None:
    spec, _ = load_study("gpt")
    model = spec.build_model()
    decayed, kept = spec.build_optimizer(model).param_groups
    assert decayed["weight_decay"] > 0
    assert kept["weight_decay"] == 0
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_seq2seq_decoder_sees_only_earlier_targets(load_study: LoadStudy) -> None:
    spec, _ = load_study("seq2seq")
    model, batch = spec.build_model(), spec.make_batch(1)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(batch["source"].sort(dim=1).values, batch["target"])
    changed = {**batch, "target": batch["target"].clone()}
    changed["target"][0, 20:] = 7
    with torch.no_grad():
        before, after = model(**batch)["logits"], model(**changed)["logits"]
    torch.testing.assert_close(before[:, :21], after[:, :21])
    assert not torch.allclose(before[:, 21:], after[:, 21:])
