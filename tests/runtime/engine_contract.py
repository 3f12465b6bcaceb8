"""What every `Engine` must do, whatever it is built on: run `check_contract` in each rank."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from runtime.config import TrainConfig
from runtime.engine import Engine
from tests.runtime.engine_runs import CPU, micro_batches, whole_parameters
from tests.runtime.models import SPECS


def check_contract(create: str, config: dict[str, Any]) -> None:
    """Build an engine with `create` ("package.module:function") and hold it to the protocol."""
    module, _, name = create.partition(":")
    spec = SPECS["gpt"]()
    settings = TrainConfig(**config)
    engine: Engine = getattr(importlib.import_module(module), name)(spec, settings, CPU)
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = [micro_batches(spec, settings, step, rank) for step in range(3)]

    assert engine.config == settings
    assert isinstance(engine.model, nn.Module)
    assert isinstance(engine.optimizer, Optimizer)
    assert_ranks_agree(engine)

    before = mean_loss(engine, batches[0])
    assert mean_loss(engine, batches[0]) == before  # a forward alone changes nothing
    result = engine.train_step(iter(batches[0]))
    assert result.loss.ndim == 0
    assert not result.loss.requires_grad
    torch.testing.assert_close(result.loss, before, rtol=1e-4, atol=0)
    assert not result.skipped
    assert (result.gradient_norm is None) == (settings.gradient_clipping is None)

    # The loss after the step is that of the new weights, and the step after it starts from them.
    after = mean_loss(engine, batches[0])
    assert abs(after - before) > 1e-4
    loss = mean_loss(engine, batches[1])
    torch.testing.assert_close(engine.train_step(batches[1]).loss, loss, rtol=1e-4, atol=0)
    assert_ranks_agree(engine)
    check_held_bytes(engine)
    for wrong in (batches[2][:-1], [*batches[2], batches[2][0]]):
        check_refuses(engine, wrong)
    engine.close()


def mean_loss(engine: Engine, batches: list[Any]) -> Tensor:
    losses = [engine.loss(batch) for batch in batches]
    assert all(loss.ndim == 0 and not loss.requires_grad for loss in losses)
    return torch.stack(losses).mean()


def assert_ranks_agree(engine: Engine) -> None:
    if not dist.is_initialized():
        return
    for name, value in whole_parameters(engine.model).items():
        mine = torch.from_numpy(value).contiguous()
        first = mine.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(mine, first), name


def check_held_bytes(engine: Engine) -> None:
    """Held over all ranks: one copy of what is sharded, a copy a rank of what is not."""
    config = engine.config
    held = engine.held_bytes()
    totals = torch.tensor([held.parameters, held.gradients, held.optimizer], dtype=torch.int64)
    if config.ranks > 1:
        dist.all_reduce(totals)
    parameters = sum(item.numel() * 4 for item in engine.model.parameters())
    buffers = sum(item.numel() * item.element_size() for item in engine.model.buffers())
    sharded = config.ranks > 1
    for total, once, stage in (
        (totals[0].item() - config.ranks * buffers, parameters, 1),
        (totals[1].item(), parameters, 1),  # at rest, reduced gradients are shards at every stage
        (totals[2].item(), 2 * parameters, 1),
    ):
        copies = 1 if sharded and config.zero_stage >= stage else config.ranks
        assert copies * once <= total <= copies * once * 1.1, (total, once, copies)


def check_refuses(engine: Engine, batches: list[Any]) -> None:
    steps = engine.config.gradient_accumulation_steps
    try:
        engine.train_step(batches)
    except ValueError as error:
        assert f"needs {steps} micro-batches" in str(error)  # noqa: PT017
    else:
        raise AssertionError(f"{len(batches)} micro-batches were taken for {steps}")
