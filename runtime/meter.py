"""What a rank measures of its own steps: seconds, tokens, bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runtime.limits import reserved_peak, reset_peak
from runtime.measurement import RankMemory
from runtime.memory_trace import trace_allocations
from runtime.model_spec import Batch

if TYPE_CHECKING:
    from runtime.engine import Engine, StepResult
    from runtime.rank import RankContext


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One optimizer step as one rank saw it."""

    seconds: float
    """From the fetch of its first batch to the fetch of the next step's."""
    loss: float
    skipped: bool


def tokens_per_sample(batch: Batch, micro_batch_size: int) -> int | None:
    """Tokens in one sample: the width of the first integer tensor of shape (samples, tokens).

    None where the batch holds no such tensor (images, features).
    """
    for leaf in tree_leaves(batch):
        if (
            isinstance(leaf, Tensor)
            and leaf.ndim == 2
            and leaf.shape[0] == micro_batch_size
            and leaf.shape[1] > 1
            and not leaf.is_floating_point()
            and leaf.dtype != torch.bool
        ):
            return int(leaf.shape[1])
    return None


def batch_bytes(batch: Batch) -> int:
    """Bytes of the tensors in `batch`."""
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on `device`; nothing to wait for on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_steps(
    engine: Engine, batches: Sequence[Sequence[Batch]], device: torch.device
) -> Iterator[TimedStep]:
    """Train without end over the given global batches in turn, and time each step.

    The clock runs from fetch to fetch, so what happens between two steps counts too.
    """
    start = time.perf_counter()
    index = 0
    while True:
        result = engine.train_step(batches[index % len(batches)])
        step = _finish(result, device, start)
        start += step.seconds
        index += 1
        yield step


def timed_step(engine: Engine, batches: Sequence[Batch], device: torch.device) -> TimedStep:
    """Train one step over the micro-batches of one global batch, and time it by itself."""
    start = time.perf_counter()
    return _finish(engine.train_step(batches), device, start)


def _finish(result: StepResult, device: torch.device, start: float) -> TimedStep:
    loss = float(result.loss)
    synchronize(device)
    return TimedStep(seconds=time.perf_counter() - start, loss=loss, skipped=bool(result.skipped))


def measured_step(
    engine: Engine, batches: Sequence[Batch], context: RankContext, startup_peak_bytes: int
) -> tuple[TimedStep, RankMemory]:
    """Train one step with every allocation recorded; its seconds are longer than a plain step's.

    Call it after a first step, so that the optimizer states exist.
    """
    before = engine.held_bytes()
    reset_peak(context.memory_baseline)
    with trace_allocations(context.device) as trace:
        step = timed_step(engine, batches, context.device)
    held = engine.held_bytes()
    memory = RankMemory(
        parameter_bytes=held.parameters,
        gradient_bytes=held.gradients,
        optimizer_bytes=held.optimizer,
        # The last step's gradients live on until this one clears them, or fills them again (DDP).
        allocated_peak_bytes=before.parameters
        + before.gradients
        + before.optimizer
        + trace.peak_bytes,
        reserved_peak_bytes=reserved_peak(context.memory_baseline),
        startup_peak_bytes=startup_peak_bytes,
    )
    return step, memory
