from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime.errors import UnsupportedModelError
from runtime.sharding import find_blocks, module_names, replicated_parameters, separable
from tests.runtime.models import (
    Block,
    ConvNet,
    EncoderDecoder,
    Expert,
    Gpt,
    MixedDtypes,
    MixtureOfExperts,
    Plain,
    Scaled,
    SharedPart,
)


class Mlp(nn.Sequential):
    def __init__(self, depth: int, width: int = 16) -> None:
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        super().__init__(*layers)


class Stages(nn.Module):
    """Uneven stages of one class, each a list of blocks; the second holds most parameters."""

    class Stage(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(self.Stage(depth) for depth in (1, 6))


class StemAndBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
        self.adapters = nn.ModuleList(Expert(2) for _ in range(2))
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))


class Backbone(nn.Module):
    """Nothing repeats: a large part of the user's own with parts, and torch's attention."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.second = nn.Bilinear(32, 8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x), x[..., :8])

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()
        self.attention = nn.MultiheadAttention(32, 2)
        self.gain = nn.Linear(1, 1)


def names(model: nn.Module) -> list[str]:
    return module_names(model, find_blocks(model))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Gpt(), ["blocks.0", "blocks.1", "blocks.2"]),
        (Gpt(depth=1), ["blocks.0"]),
        (EncoderDecoder(), ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        (MixtureOfExperts(), ["blocks.0", "blocks.1"]),
        (ConvNet(), ["blocks.0", "blocks.1", "blocks.2"]),
        (Mlp(3), ["0", "2", "4"]),
        (Stages(), ["stages.0", *(f"stages.1.blocks.{index}" for index in range(6))]),
        (StemAndBlocks(), [f"blocks.{index}" for index in range(4)]),
        (Plain(), ["embed", "lstm", "head"]),
        (Backbone(), ["inner.first", "inner.second", "attention"]),
        (nn.Linear(3, 3), []),
        (nn.ReLU(), []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_find_blocks(model: nn.Module, expected: list[str]) -> None:
    assert names(model) == expected


def test_a_block_registered_many_times_is_found_once() -> None:
    block = Block()
    assert find_blocks(nn.Sequential(block, block, block)) == [block]


def test_named_block_classes() -> None:
    model = MixtureOfExperts()
    found = find_blocks(model, (Expert,))
    assert len(found) == 8
    assert all(isinstance(block, Expert) for block in found)


def test_unknown_block_classes_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Gpt holds no Expert, Stages"):
        find_blocks(Gpt(), (Expert, Stages))


def test_blocks_that_share_parameters_are_not_separable() -> None:
    model = SharedPart()
    assert module_names(model, separable(model, find_blocks(model))) == ["blocks.2", "blocks.3"]


def test_a_block_that_shares_with_the_root_is_not_separable() -> None:
    model = Gpt(width=8)
    model.blocks[1].out.weight = nn.Parameter(torch.zeros(8, 8))
    model.extra = nn.Linear(8, 8)
    model.extra.weight = model.blocks[1].out.weight
    assert module_names(model, separable(model, model.blocks)) == ["blocks.0", "blocks.2"]


def test_replicated_parameters() -> None:
    def named(model: nn.Module, *, lowered: bool) -> set[str]:
        whole = replicated_parameters(model, find_blocks(model), lowered=lowered)
        return {name for name, item in model.named_parameters() if item in whole}

    scalars = {"layers.0.gain", "layers.1.gain", "idle_gain", "temperature"}
    assert named(Scaled(), lowered=False) == scalars
    assert named(Gpt(), lowered=True) == set()
    assert named(ConvNet(), lowered=False) == set()
    norms = {name for name, _ in ConvNet().named_parameters() if "norm" in name}
    assert named(ConvNet(), lowered=True) == norms
    routers = {name for name, _ in MixedDtypes().named_parameters() if "router" in name}
    assert named(MixedDtypes(), lowered=False) == routers


def test_frozen_parameters_of_another_dtype_are_shards() -> None:
    model = MixedDtypes()
    for layer in model.layers:
        layer.router.requires_grad_(False)
    assert replicated_parameters(model, find_blocks(model), lowered=False) == set()
