"""The jobs of the one rank that profiles a model: a short real run, or a trace without memory.

Both report facts as they find them, so that a run that ends halfway has still told something:
`facts` (fields of a ModelProfile), `micro_batch` (size, bytes, seconds) and `note` (a sentence).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from runtime.config import TrainConfig
from runtime.engine import Engine, create_engine
from runtime.errors import ModelFileError, RunError, UserError
from runtime.measure import seed_everything
from runtime.memory_trace import trace_allocations
from runtime.meter import synchronize, tokens_per_sample
from runtime.model_file import user_error
from runtime.model_spec import Batch, ModelSpec, load_model_spec, move_batch, split_batch
from runtime.rank import RankContext
from runtime.sharding import find_blocks, separable
from runtime.verdict import is_out_of_memory

_SIZES = (1, 2)
_TIMED_PASSES = 3
_TIMED_SECONDS = 2.0
_SAME = 1e-5
"""Relative difference up to which two losses or gradients in fp32 count as the same."""
_DEPENDENT = 1e-4
"""Relative difference of gradients from which the loss depends on the micro-batch size."""
_CANNOT_TRACE = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError)


def profile_job(payload: dict[str, Any], context: RankContext) -> None:
    """Build, take one optimizer step, then forward and backward at two micro-batch sizes.

    fp32, one rank, nothing sharded or checkpointed. `payload` holds the path `model_file`.

    Raises:
        ModelFileError: the user's code raised, or its first loss or gradient is not finite.
    """
    spec = load_model_spec(Path(payload["model_file"]))
    seed_everything(0)
    batches = {size: spec.make_batch(size) for size in _SIZES}
    _report_batch(spec, batches, context)
    engine = create_engine(spec, TrainConfig(), context.device)
    context.report("facts", **model_facts(engine.model, spec))

    smallest = _first_step(spec, engine, batches, context)
    context.report("facts", optimizer_state_bytes=engine.held_bytes().optimizer)
    passes = _Passes(spec, engine.model, context.device)
    for size in (smallest, 2 * smallest):
        batch = batches[size] if size in batches else spec.make_batch(size)
        batch = move_batch(batch, context.device)
        with trace_allocations(context.device) as trace:
            passes.run(batch)
        context.report("micro_batch", size=size, bytes=trace.peak_bytes)
        context.report("micro_batch", size=size, seconds=passes.seconds(batch))
        if size == smallest:
            context.report("facts", stochastic=not passes.repeats(batch))
    _compare_halves(passes, batch, size, context)


def trace_job(payload: dict[str, Any], context: RankContext) -> None:
    """The same facts under fake tensors, which have shapes but no memory; nothing is timed.

    Raises:
        RunError: the model cannot be built that way, since its builder reads values of tensors.
    """
    spec = load_model_spec(Path(payload["model_file"]))
    seed_everything(0)
    batches = {size: spec.make_batch(size) for size in _SIZES}
    _report_batch(spec, batches, context)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            model = spec.build_model()
        except ModelFileError as error:
            raise RunError(f"the model cannot be built without memory: {error}") from error
        model.train()
        context.report("facts", **model_facts(model, spec))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        optimizer = _traced_optimizer(spec, model, context)
        for size, batch in batches.items():
            try:
                traced = _traced_bytes(spec, model, optimizer, mode, batch)
            except _CANNOT_TRACE as error:
                context.report(
                    "note",
                    text=f"The bytes of activations are a guess: tracing micro-batch {size} "
                    f"raised {type(error).__name__}: {_first_line(error)}",
                )
                return
            context.report("micro_batch", size=size, bytes=traced)


def model_facts(model: nn.Module, spec: ModelSpec) -> dict[str, Any]:
    """Fields of a ModelProfile that follow from the modules alone."""
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    blocks = find_blocks(model, spec.block_classes)
    groups = [_bytes(block.parameters()) for block in separable(model, blocks)]
    return {
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "trainable_parameter_count": sum(parameter.numel() for parameter in trainable),
        "parameter_bytes": _bytes(parameters),
        "trainable_bytes": _bytes(trainable),
        "buffer_bytes": _bytes(model.buffers()),
        "block_class": _block_class(blocks, spec),
        "block_count": len(blocks),
        "largest_block_bytes": max(groups, default=0),
        "root_bytes": _bytes(parameters) - sum(groups),
    }


def _block_class(blocks: list[nn.Module], spec: ModelSpec) -> str | None:
    """The commonest class among blocks of one size; None where they are parts that differ."""
    kinds = Counter((type(block).__name__, _bytes(block.parameters())) for block in blocks)
    if not kinds:
        return None
    (name, _), count = kinds.most_common(1)[0]
    return name if count > 1 or spec.block_classes else None


class _Passes:
    """Forward and backward of one model, with the user's errors named."""

    def __init__(self, spec: ModelSpec, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self._spec = spec
        self._device = device

    def run(self, batch: Batch, scale: float = 1.0) -> float:
        """Adds `scale` times the gradient to what is there; returns the loss."""
        with users_code(self._spec.path, "the forward pass"):
            loss = self._spec.compute_loss(self.model, batch)
        with users_code(self._spec.path, "the backward pass"):
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def seconds(self, batch: Batch) -> float:
        """Median of a few passes."""
        times: list[float] = []
        while len(times) < _TIMED_PASSES and sum(times) < _TIMED_SECONDS:
            synchronize(self._device)
            start = time.perf_counter()
            self.run(batch)
            synchronize(self._device)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def repeats(self, batch: Batch) -> bool:
        """Whether two passes over the same batch give the same loss."""
        first, second = self.run(batch), self.run(batch)
        return math.isclose(first, second, rel_tol=_SAME)

    def gradients(self, parts: list[Batch]) -> dict[str, Tensor]:
        """Name → mean gradient over equal parts of a batch; fp32, on CPU."""
        self.model.zero_grad(set_to_none=True)
        for part in parts:
            self.run(part, scale=1 / len(parts))
        return {
            name: parameter.grad.detach().float().to("cpu", copy=True)
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


@contextmanager
def users_code(path: Path, doing: str) -> Iterator[None]:
    """Errors raised within become a ModelFileError with the user's file and line.

    Want of memory and errors that name their cause already pass as they are.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise user_error(path, error, doing) from error


def relative_difference(whole: dict[str, Tensor], halves: dict[str, Tensor]) -> float:
    """Largest 2-norm of a parameter's difference, relative to its gradient's norm.

    Parameters whose gradient is below a thousandth of the global norm are compared with that, so
    that rounding noise in a vanishing gradient does not count.
    """
    total = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in whole.values()))
    if total == 0.0:
        return 0.0
    worst = 0.0
    for name, gradient in whole.items():
        other = halves.get(name, torch.zeros_like(gradient))
        norm = max(float(gradient.norm()), 1e-3 * total)
        worst = max(worst, float((gradient - other).norm()) / norm)
    return worst


def _report_batch(spec: ModelSpec, batches: dict[int, Batch], context: RankContext) -> None:
    smallest = min(batches)
    context.report(
        "facts",
        global_batch_size=spec.global_batch_size,
        tokens_per_sample=tokens_per_sample(batches[smallest], smallest),
    )


def _first_step(
    spec: ModelSpec, engine: Engine, batches: dict[int, Batch], context: RankContext
) -> int:
    """Take one optimizer step at the smallest micro-batch size that works, and return that."""
    failure: ModelFileError | None = None
    for size in sorted(batches):
        try:
            with users_code(spec.path, "the first step"):
                result = engine.train_step([batches[size]])
        except ModelFileError as error:
            failure = failure or error
            continue
        _check_finite(spec, result.loss, "loss")
        if result.gradient_norm is not None:
            _check_finite(spec, result.gradient_norm, "gradient norm")
        context.report("facts", optimizer=type(engine.optimizer).__name__)
        if failure is not None:
            text = f"Micro-batch size {size} is the smallest that works: {failure}"
            context.report("note", text=text)
        return size
    assert failure is not None
    raise failure


def _check_finite(spec: ModelSpec, value: Tensor, name: str) -> None:
    if not math.isfinite(float(value)):
        raise ModelFileError(
            f"{spec.path}: the {name} of the first step must be finite, but got {float(value)}: "
            "look at what make_batch and compute_loss return, and how the model is initialised"
        )


def _compare_halves(passes: _Passes, batch: Batch, size: int, context: RankContext) -> None:
    """Compare the gradient of `batch` with the mean of its halves', free of dropout."""
    with _without_dropout(passes.model):
        if not passes.repeats(batch):
            context.report(
                "note",
                text="Whether the gradient depends on the micro-batch size is not known: the model "
                "draws random numbers of its own (not from nn.Dropout).",
            )
            return
        whole = passes.gradients([batch])
        halves = passes.gradients(split_batch(batch, size, 2))
    difference = relative_difference(whole, halves)
    context.report("facts", halves_difference=difference)
    if difference > _DEPENDENT:
        context.report(
            "note",
            text=f"The gradient depends on the micro-batch size: that of {size} samples differs "
            f"from the mean of its halves' by up to {difference:.1%} of a parameter's gradient "
            "(BatchNorm, a mean over ragged samples or a loss across samples does that).",
        )


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout modules in evaluation mode; all others, batch norms too, as they are."""
    dropouts = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training
    ]
    for module in dropouts:
        module.eval()
    try:
        yield
    finally:
        for module in dropouts:
            module.train()


def _traced_optimizer(spec: ModelSpec, model: nn.Module, context: RankContext) -> Optimizer | None:
    try:
        optimizer = spec.build_optimizer(model)
        optimizer.step()
    except _CANNOT_TRACE as error:
        states = 2 * _bytes(item for item in model.parameters() if item.requires_grad)
        context.report("facts", optimizer="unknown", optimizer_state_bytes=states)
        context.report(
            "note",
            text=f"The optimizer cannot be traced ({type(error).__name__}: {_first_line(error)}): "
            "two states a parameter are assumed, as Adam has.",
        )
        return None
    states = _bytes(filter(_is_tensor, tree_leaves(dict(optimizer.state))))
    context.report("facts", optimizer=type(optimizer).__name__, optimizer_state_bytes=states)
    return optimizer


def _traced_bytes(
    spec: ModelSpec,
    model: nn.Module,
    optimizer: Optimizer | None,
    mode: FakeTensorMode,
    batch: Batch,
) -> int:
    """Peak of forward and backward beside parameters, buffers, gradients and states, in bytes."""
    fake = tree_map(lambda leaf: mode.from_tensor(leaf) if _is_tensor(leaf) else leaf, batch)
    tracker = MemTracker()
    tracker.track_external(model, *([optimizer] if optimizer is not None else []))
    with tracker:
        spec.compute_loss(model, fake).backward()  # type: ignore[no-untyped-call]
    peak = tracker.get_tracker_snapshot("peak").values()
    beside = (_MemRefType.ACT, _MemRefType.TEMP, _MemRefType.OTH)
    return sum(device[kind] for device in peak for kind in beside)


def _bytes(tensors: Iterable[Tensor]) -> int:
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
