"""Engine: one optimizer step over the micro-batches of a global batch.

`create_engine` applies, in this order: build and agree on one model, find its blocks, checkpoint
and compile them, share the work over the ranks, build the optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from runtime.activation_checkpoint import checkpoint_block
from runtime.config import TrainConfig
from runtime.data_parallel import (
    DataParallel,
    LossModule,
    Replicated,
    Sharded,
    SingleRank,
)
from runtime.errors import ConfigError, UnsupportedModelError
from runtime.model_spec import Batch, ModelSpec, move_batch
from runtime.model_state import broadcast_state, named_state, unique_bytes
from runtime.optim import check_optimizer, clip_gradients, separate_shards
from runtime.precision import LossScaler, autocast, lowered_dtype
from runtime.probe import agreed_groups, probe_blocks, untouched
from runtime.sharding import find_blocks, separable

_SEED = 0


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, on this rank."""

    loss: Tensor
    """0-dim, detached: the mean over this rank's micro-batches."""
    gradient_norm: Tensor | None
    """0-dim: the global 2-norm before clipping; None where nothing is clipped."""
    skipped: bool
    """The optimizer did not step: a gradient was not finite (fp16 loss scaling)."""


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one rank's distinct storages."""

    parameters: int
    """Parameters and buffers, as held between steps."""
    gradients: int
    """As held just before the last optimizer step."""
    optimizer: int


class Engine(Protocol):
    """One rank's part in the training of one model under one configuration."""

    config: TrainConfig
    model: nn.Module
    """As the user built it, wrapped and sharded in place."""
    optimizer: Optimizer

    def train_step(self, micro_batches: Iterable[Batch]) -> StepResult:
        """One optimizer step over exactly `gradient_accumulation_steps` micro-batches.

        The gradient is the mean over the global batch. Collective.
        """

    def loss(self, batch: Batch) -> Tensor:
        """0-dim loss of one micro-batch, without gradients, in the model's present mode.

        Collective at stages 1 to 3.
        """

    def held_bytes(self) -> HeldBytes:
        """What this rank holds."""

    def close(self) -> None:
        """Let the model and the optimizer go."""


def create_engine(spec: ModelSpec, config: TrainConfig, device: torch.device) -> Engine:
    """Build the model and everything that trains it. Every rank calls it.

    Where `config.ranks` > 1 the process group must be up. Afterwards each rank's generators are
    seeded differently (dropout).

    Raises:
        ConfigError: the process group is not of `config.ranks` ranks.
        ModelFileError: the user's code raised or broke a rule of the model file.
        UnsupportedModelError: the model or its optimizer cannot train under `config`.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != config.ranks:
        raise ConfigError(
            "config.ranks must be the number of processes that run, "
            f"{ranks}, but got {config.ranks}"
        )
    sharded = config.ranks > 1 and config.zero_stage > 0
    _seed(_SEED)
    model = spec.build_model().to(device)
    model.train()
    _drop_generation_caches(model)
    _refuse_sparse_gradients(model, config)
    check_optimizer(spec, model, sharded=sharded)

    module = LossModule(model, spec.compute_loss)
    blocks = find_blocks(model, spec.block_classes)
    groups: list[nn.Module] = []
    calls: list[int] = []
    if sharded:
        candidates = separable(model, blocks)
        _seed(_SEED + 1 + dist.get_rank())  # different samples, so that choices by data show
        with autocast(config.precision, device):
            traced = probe_blocks(module, candidates, _small_batch(spec, config, device))
        groups, calls = agreed_groups(traced, candidates)
    if config.ranks > 1:
        broadcast_state(model)
    _prepare_blocks(model, blocks, config)

    parallel: DataParallel
    if config.ranks == 1:
        parallel = SingleRank(module)
    elif not sharded:
        parallel = Replicated(module, config, device)
    else:
        parallel = Sharded(module, groups, calls, config, device)
    optimizer = spec.build_optimizer(model)
    separate_shards(optimizer)
    engine = TorchEngine(config, model, optimizer, parallel, device)
    if isinstance(parallel, Sharded) and lowered_dtype(config.precision) is not None:
        _settle_autocast(engine, parallel, _small_batch(spec, config, device))
    _seed(_SEED + 1 + (dist.get_rank() if config.ranks > 1 else 0))
    return engine


class TorchEngine:
    """The `Engine` of torch.distributed: plain, DDP, or FSDP2."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: Optimizer,
        parallel: DataParallel,
        device: torch.device,
    ) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self._parallel = parallel
        self._device = device
        self._trainable = [item for item in model.parameters() if item.requires_grad]
        self.scaler = (
            LossScaler(device, sharded=parallel.sharded) if config.precision == "fp16" else None
        )

    def train_step(self, micro_batches: Iterable[Batch]) -> StepResult:
        steps = self.config.gradient_accumulation_steps
        # Here, not after the step, so that `held_bytes` finds the gradients as they were.
        for parameter in self._trainable:
            parameter.grad = None
        total: Tensor | None = None
        for index, batch in enumerate(_exactly(steps, micro_batches)):
            moved = batch if self._device.type == "cpu" else move_batch(batch, self._device)
            with self._parallel.micro_batch(last=index == steps - 1):
                with autocast(self.config.precision, self._device):
                    loss = self._parallel.module(moved)
                loss = loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss
                loss = loss / steps if steps > 1 else loss
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        self._parallel.finish_gradients()
        skipped = self.scaler is not None and self.scaler.unscale_and_check(self.optimizer)
        norm = None
        if not skipped:
            if self.config.gradient_clipping is not None:
                norm = clip_gradients(self._trainable, self.config.gradient_clipping)
            self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        return StepResult(loss=total, gradient_norm=norm, skipped=skipped)

    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        moved = move_batch(batch, self._device)
        with autocast(self.config.precision, self._device):
            loss = self._parallel.forward_only(moved)
        return loss.detach()

    def held_bytes(self) -> HeldBytes:
        gradients = (item.grad for item in self._trainable if item.grad is not None)
        states = (leaf for leaf in tree_leaves(dict(self.optimizer.state)))
        return HeldBytes(
            parameters=unique_bytes(tensor for _, tensor in named_state(self.model)),
            gradients=unique_bytes(gradients),
            optimizer=unique_bytes(leaf for leaf in states if isinstance(leaf, Tensor)),
        )

    def close(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self._trainable = []
        del self._parallel


def _exactly(count: int, batches: Iterable[Batch]) -> Iterable[Batch]:
    iterator = iter(batches)
    for index in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            raise ValueError(
                f"`train_step` needs {count} micro-batches (gradient_accumulation_steps), "
                f"but got {index}"
            ) from None
        yield batch
    if next(iterator, None) is not None:
        raise ValueError(
            f"`train_step` needs {count} micro-batches (gradient_accumulation_steps), but got more"
        )


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def _drop_generation_caches(model: nn.Module) -> None:
    """Training needs no key-value cache, and recomputation would append to it twice."""
    for module in model.modules():
        settings = getattr(module, "config", None)
        if settings is not None and getattr(settings, "use_cache", False):
            settings.use_cache = False


def _refuse_sparse_gradients(model: nn.Module, config: TrainConfig) -> None:
    if config.ranks == 1 and config.precision != "fp16" and config.gradient_clipping is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedModelError(
                f"module {name!r} must not give sparse gradients, but it was built with "
                "sparse=True: they train only on one rank, without fp16 and without clipping"
            )


def _small_batch(spec: ModelSpec, config: TrainConfig, device: torch.device) -> Batch:
    return move_batch(spec.make_batch(min(2, config.micro_batch_size)), device)


def _prepare_blocks(model: nn.Module, blocks: list[nn.Module], config: TrainConfig) -> None:
    """Checkpoint inside, compile outside: the compiler then sees what is recomputed."""
    if config.activation_checkpointing != "none" and not blocks:
        raise UnsupportedModelError(
            f"activation_checkpointing must be none for {type(model).__name__}: "
            "it holds no modules that could be recomputed one by one"
        )
    for block in blocks:
        checkpoint_block(block, config.activation_checkpointing, compiled=config.compile)
    if config.compile:
        for block in blocks or [model]:
            block.forward = torch.compile(block.forward)


def _settle_autocast(engine: TorchEngine, parallel: Sharded, batch: Batch) -> None:
    """Blocks that mix dtypes inside run under autocast; found out by one small forward."""
    try:
        with untouched(parallel.module):
            engine.loss(batch)
    except (RuntimeError, TypeError, ValueError):
        parallel.recover()
        parallel.autocast_blocks()
        with untouched(parallel.module):
            engine.loss(batch)
