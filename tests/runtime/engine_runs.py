"""What engine tests run in the ranks, and the plain single-process loop they are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.config import TrainConfig
from runtime.engine import Engine, create_engine
from runtime.model_spec import Batch, ModelSpec, split_batch
from tests.runtime.models import SPECS

CPU = torch.device("cpu")


def global_batch(spec: ModelSpec, size: int, step: int) -> Batch:
    """The samples of one optimizer step, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 + step)
        return spec.make_batch(size)


def micro_batches(spec: ModelSpec, config: TrainConfig, step: int, rank: int) -> list[Batch]:
    size = config.global_batch_size
    parts = split_batch(global_batch(spec, size, step), size, size // config.micro_batch_size)
    steps = config.gradient_accumulation_steps
    return parts[rank * steps : (rank + 1) * steps]


def plain_loop(name: str, config: TrainConfig, steps: int) -> dict[str, Any]:
    """Plain PyTorch in fp32, one process, over the same micro-batches."""
    spec = SPECS[name]()
    torch.manual_seed(0)
    model = spec.build_model()
    optimizer = spec.build_optimizer(model)
    size = config.global_batch_size
    count = size // config.micro_batch_size
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        parts = split_batch(global_batch(spec, size, step), size, count)
        total = 0.0
        for part in parts:
            loss = spec.compute_loss(model, part) / count
            loss.backward()
            total += loss.item()
        trainable = [item for item in model.parameters() if item.requires_grad]
        if config.gradient_clipping is not None:
            norm = nn.utils.clip_grad_norm_(trainable, config.gradient_clipping)
            norms.append(norm.item())
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "parameters": whole_parameters(model)}


def train(name: str, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train in this rank, for its rank's share of each global batch."""
    torch.manual_seed(77)  # create_engine must not depend on where the generator stands
    spec = SPECS[name]()
    settings = TrainConfig(**config)
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = create_engine(spec, settings, CPU)
    losses, norms, skipped = [], [], 0
    for step in range(steps):
        result = engine.train_step(micro_batches(spec, settings, step, rank))
        loss = result.loss.clone()
        if settings.ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / settings.ranks)
        norms.append(None if result.gradient_norm is None else result.gradient_norm.item())
        skipped += result.skipped
    output = {
        "losses": losses,
        "norms": norms,
        "skipped": skipped,
        "parameters": whole_parameters(engine.model),
        "buffers": {key: value.tolist() for key, value in engine.model.named_buffers()},
        "held": engine.held_bytes(),
        "groups": group_names(engine),
    }
    engine.close()
    return output


def group_names(engine: Engine) -> list[str]:
    return [
        name
        for name, module in engine.model.named_modules()
        if type(module).__name__.startswith("FSDP")
    ]


def whole_parameters(model: nn.Module) -> dict[str, Any]:
    return {name: whole(item).detach().float().numpy() for name, item in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
