from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.activation_checkpoint import checkpoint_block
from runtime.config import ActivationCheckpointing, TrainConfig
from runtime.engine import create_engine
from runtime.errors import UnsupportedModelError
from runtime.memory_trace import trace_allocations
from tests.runtime.engine_runs import CPU, assert_same, plain_loop, settings, train
from tests.runtime.models import Block, ConvBlock, features, make_spec
from tests.runtime.ranks import Ranks

STEPS = 5
MODES: list[ActivationCheckpointing] = ["none", "selective", "full"]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["gpt", "conv", "plain"])
def test_trains_as_without(name: str, mode: str) -> None:
    config = settings(ranks=1, activation_checkpointing=mode)
    plain = plain_loop(name, TrainConfig(**config), STEPS)
    assert_same(train(name, config, STEPS), plain)


@pytest.mark.parametrize(
    ("stage", "mode"), [(0, "selective"), (1, "full"), (2, "selective"), (3, "full")]
)
def test_trains_as_without_on_two_ranks(two_ranks: Ranks, stage: int, mode: str) -> None:
    config = settings(zero_stage=stage, activation_checkpointing=mode)
    for name in ("conv", "moe"):
        plain = plain_loop(name, TrainConfig(**config), STEPS)
        ours = two_ranks.call(
            "tests.runtime.engine_runs:train", name=name, config=config, steps=STEPS
        )
        assert_same(ours[0], plain)


class Products(TorchDispatchMode):
    """Counts the matrix products that run."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def blocks(mode: ActivationCheckpointing) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(4)))
    for block in model:
        checkpoint_block(block, mode)
    return model, torch.randn(4, 64, 32, requires_grad=True)


def test_full_recomputes_products_and_selective_keeps_them() -> None:
    counts = {}
    for mode in MODES:
        model, x = blocks(mode)
        with Products() as products:
            model(x).sum().backward()
        counts[mode] = products.count
    assert counts["selective"] == counts["none"]
    assert counts["full"] > counts["none"] * 1.2


def test_each_mode_keeps_less() -> None:
    held = {}
    for mode in MODES:
        model, x = blocks(mode)
        with trace_allocations(CPU) as trace:
            loss = model(x).sum()
        held[mode] = trace.end_bytes
        loss.backward()
    assert held["full"] < held["selective"] / 2
    assert held["selective"] < held["none"] * 0.9


def test_dropout_repeats_in_the_recomputation() -> None:
    gradients = []
    for mode in MODES:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        checkpoint_block(block, mode)
        block(torch.ones(8, 16)).sum().backward()
        gradients.append(block[0].weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_statistics_move_once(momentum: float | None) -> None:
    states = []
    for mode in MODES:
        torch.manual_seed(0)
        block = ConvBlock(4)
        block.norm.momentum = momentum
        checkpoint_block(block, mode)
        for _ in range(2):
            block(torch.randn(2, 4, 3, 3)).sum().backward()
        assert block.norm.momentum == momentum
        states.append({name: value.tolist() for name, value in block.named_buffers()})
    assert states[0] == states[1] == states[2]
    assert states[0]["norm.num_batches_tracked"] == 2


def test_nothing_is_kept_for_a_forward_without_gradients() -> None:
    model, x = blocks("full")
    with torch.no_grad():
        assert not model(x).requires_grad


def test_a_model_in_one_piece_is_refused() -> None:
    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x @ self.weight - y).square().mean()

    spec = make_spec(Piece, features)
    with pytest.raises(UnsupportedModelError, match="must be none for Piece"):
        create_engine(spec, TrainConfig(activation_checkpointing="full"), CPU)
