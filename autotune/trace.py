"""Traces one unsharded model: a timeline for each arithmetic and checkpointing of the engine.

Fake tensors have shapes but no memory, so a model of any size is traced within its builder's own
few megabytes. A model that reads values of tensors (routing by `nonzero`, `.item()`) runs on real
ones instead, at two small micro-batch sizes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from autotune.live_bytes import LiveBytes, live_tensors
from autotune.model_trace import (
    ARITHMETICS,
    ModelTrace,
    StepTrace,
    TracedParameter,
    timeline_key,
)
from autotune.records import dump
from autotune.timeline import Timeline, join
from autotune.watch import on_gradient, watch_group
from autotune.workspace import RecordedCalls, Workspaces
from runtime.activation_checkpoint import checkpoint_block
from runtime.config import ActivationCheckpointing, Precision
from runtime.data_parallel import _own_outputs
from runtime.engine import _drop_generation_caches
from runtime.errors import ModelFileError
from runtime.measure import seed_everything
from runtime.meter import batch_bytes
from runtime.model_spec import Batch, ModelSpec, load_model_spec, move_batch
from runtime.probe import probe_blocks
from runtime.rank import RankContext
from runtime.sharding import find_blocks, module_names, replicated_parameters, separable

SIZES = (2, 8)
"""Micro-batch sizes of the two passes. Not 1: tensors with a dimension of 1 are contiguous in
every layout, so operations copy less than they do for larger sizes. Wide apart: what kernels take
for themselves stops growing once their blocks are full."""
REAL_SIZES = (2, 4)
"""The same where the passes are real ones."""
CHECKPOINTINGS: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full")
_CANNOT_TRACE = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError)
_LOWERED = torch.bfloat16
"""Stands for fp16 too, which is as wide and handled alike."""


def trace_job(payload: dict[str, Any], context: RankContext) -> None:
    """Report `trace`, whose `record` is a ModelTrace as JSON.

    `payload` holds the path `model_file`; optionally `arithmetics` and `checkpointings`, lists of
    those wanted (default: all).

    Raises:
        ModelFileError: the user's code raised.
    """
    spec = load_model_spec(Path(payload["model_file"]))
    trace = trace_model(
        spec,
        context.device,
        arithmetics=payload.get("arithmetics", ARITHMETICS),
        checkpointings=payload.get("checkpointings", CHECKPOINTINGS),
    )
    context.report("trace", record=dump(trace))


def trace_model(
    spec: ModelSpec,
    device: torch.device,
    *,
    arithmetics: Iterable[str] = ARITHMETICS,
    checkpointings: Iterable[ActivationCheckpointing] = CHECKPOINTINGS,
) -> ModelTrace:
    """Trace the model of `spec`; on real tensors where fake ones cannot follow it.

    Raises:
        ModelFileError: the user's code raised on real tensors.
    """
    wanted = [(kind, mode) for kind in arithmetics for mode in checkpointings]
    start = time.perf_counter()
    try:
        trace = _Tracer(spec, device, FakeTensorMode(allow_non_fake_inputs=True)).trace(wanted)
    except (*_CANNOT_TRACE, ModelFileError) as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        trace = _Tracer(spec, device, None).trace(wanted)
        trace = replace(trace, traced=False, reason=reason)
    return replace(trace, seconds=time.perf_counter() - start)


class _Tracer:
    """One model under one kind of tensors: those of `fake`, or real ones.

    The mode is entered for the builder alone. In a pass the fake parameters and batch carry it
    along, while small tensors made on the way (positions, masks) stay real: libraries that look
    at their values, or ask whether they are traced, then go the way of a real run.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, fake: FakeTensorMode | None) -> None:
        self._spec = spec
        self._device = device
        self._fake = fake
        self._workspaces = RecordedCalls() if fake is None else Workspaces()
        seed_everything(0)
        self._sizes = REAL_SIZES if fake is None else SIZES
        self._batches = {size: self._tensors(spec.make_batch(size)) for size in self._sizes}
        self.model = self._build()
        self.model.train()
        _drop_generation_caches(self.model)
        self._blocks = find_blocks(self.model, spec.block_classes)
        self._groups = self._separate_groups()

    def trace(self, wanted: Sequence[tuple[str, ActivationCheckpointing]]) -> ModelTrace:
        """The record, with the timelines in `wanted` as far as they can be traced."""
        notes: list[str] = []
        timelines: dict[str, Timeline] = {}
        for kind, checkpointing in wanted:
            if checkpointing != "none" and not self._blocks:
                continue
            try:
                timelines.update(self._timelines(kind, checkpointing))
            except _CANNOT_TRACE as error:
                if (kind, checkpointing) == ("fp32", "none"):
                    raise
                what = f"{kind} {checkpointing}"
                notes.append(f"{what}: {type(error).__name__}: {_first_line(error)}")
        used = {
            moment.index
            for timeline in timelines.values()
            for moment in timeline.moments
            if moment.kind == "gradient"
        }
        parameters = self._parameters(used)
        parameters, step = self._with_states(parameters)
        small, large = self._sizes
        fixed = batch_bytes(self._batches[small])
        slope = (batch_bytes(self._batches[large]) - fixed) / (large - small)
        return ModelTrace(
            parameters=parameters,
            buffer_bytes=_bytes(self.model.buffers()),
            groups=tuple(module_names(self.model, self._groups)),
            timelines=timelines,
            step=step,
            batch_bytes=(fixed - slope * small, slope),
            device=self._device.type,
            notes=tuple(notes),
        )

    def _build(self) -> nn.Module:
        if self._fake is None:
            return self._spec.build_model().to(self._device)
        try:
            with self._fake:
                model = self._spec.build_model()
        except (*_CANNOT_TRACE, ModelFileError):  # the builder reads values, as by `.item()`
            seed_everything(0)
            model = self._spec.build_model()
        _convert(model, self._tensors)
        return model

    def _tensors(self, tree: Any) -> Any:
        """`tree` with its tensors on the device, fake where this tracer is."""
        fake = self._fake
        if fake is None:
            return move_batch(tree, self._device)

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf if isinstance(leaf, FakeTensor) else fake.from_tensor(leaf)

        return move_batch(tree_map(convert, tree), self._device)

    def _separate_groups(self) -> list[nn.Module]:
        """The blocks that gather by themselves; `runtime.probe.agreed_groups` for one rank."""
        candidates = separable(self.model, self._blocks)
        loss = functools.partial(self._spec.compute_loss, self.model)
        # Fake buffers hold no values to put back, so the probe need not know of them.
        calls = probe_blocks(_Callable(loss), candidates, self._batches[self._sizes[0]])
        uncalled = {type(block) for i, block in enumerate(candidates) if i not in calls.order}
        return [
            block
            for i, block in enumerate(candidates)
            if i not in calls.leaky and type(block) not in uncalled
        ]

    def _timelines(
        self, kind: str, checkpointing: ActivationCheckpointing
    ) -> Iterator[tuple[str, Timeline]]:
        """Key and timeline, of each precision that computes in this way."""
        with ExitStack() as stack:
            stack.enter_context(_restored_forwards([*self._blocks, *self._groups]))
            for block in self._blocks:
                checkpoint_block(block, checkpointing)
            if kind == "cast":
                stack.enter_context(self._lowered_parameters())
                checkpointed = [group.forward for group in self._groups]
                self._lower(checkpointed, inputs=True)
                try:
                    passes = [self._pass(size, kind) for size in self._sizes]
                except _CANNOT_TRACE:  # as runtime.engine._settle_autocast
                    self._lower(checkpointed, inputs=False)
                    passes = [self._pass(size, kind) for size in self._sizes]
            else:
                passes = [self._pass(size, kind) for size in self._sizes]
        precisions: tuple[Precision, ...] = ("fp32",) if kind == "fp32" else ("bf16", "fp16")
        for precision in precisions:
            # Operations are the same in fp16 as in bf16; their kernels are not.
            dtype = torch.float16 if precision == "fp16" else None
            first, second = (
                live.sample(size, dtype) for size, live in zip(self._sizes, passes, strict=True)
            )
            yield timeline_key(kind, precision, checkpointing), join(first, second)

    def _lower(self, forwards: Sequence[Callable[..., Any]], *, inputs: bool) -> None:
        from runtime.precision import lower_inputs

        for group, forward in zip(self._groups, forwards, strict=True):
            owned = _own_outputs(forward)
            group.forward = lower_inputs(owned, _LOWERED, self._device) if inputs else owned

    def _pass(self, size: int, kind: str) -> LiveBytes:
        """One forward and backward pass over a micro-batch of `size`."""
        batch = self._batches[size]
        known = [*self.model.parameters(), *self.model.buffers(), *live_tensors(batch)]
        live = LiveBytes(known, self._workspaces)
        handles: list[Any] = []
        for index, group in enumerate(self._groups):
            handles += watch_group(group, index, live)
        for index, parameter in enumerate(self.model.parameters()):
            parameter.grad = None
            if parameter.requires_grad:
                complete = on_gradient(index, live)
                handle = parameter.register_post_accumulate_grad_hook(complete)  # type: ignore[no-untyped-call]
                handles.append(handle)
        cast = torch.autocast(self._device.type, dtype=_LOWERED, enabled=kind != "fp32")
        try:
            with self._workspaces, live:
                with cast:
                    loss = self._spec.compute_loss(self.model, batch)
                live.moment("loss")
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
                live.moment("end")
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self.model.parameters():
                parameter.grad = None
        return live

    @contextmanager
    def _lowered_parameters(self) -> Iterator[None]:
        """Parameters in the compute dtype, as FSDP2 gathers them; whole ones stay as they are."""
        whole = replicated_parameters(self.model, self._groups, lowered=True)
        places = [
            (module, name, parameter)
            for module in self.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        lowered: dict[int, nn.Parameter] = {}
        for module, name, parameter in places:
            if parameter in whole or not _lowers(parameter):
                continue
            if id(parameter) not in lowered:
                data = parameter.detach().to(_LOWERED)
                lowered[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = lowered[id(parameter)]
        try:
            yield
        finally:
            for module, name, parameter in places:
                module._parameters[name] = parameter

    def _parameters(self, used: set[int]) -> tuple[TracedParameter, ...]:
        group_of = {
            id(item): i for i, group in enumerate(self._groups) for item in group.parameters()
        }
        whole = replicated_parameters(self.model, self._groups, lowered=False)
        whole_lowered = replicated_parameters(self.model, self._groups, lowered=True)
        return tuple(
            TracedParameter(
                name=name,
                rows=parameter.shape[0] if parameter.ndim else 1,
                row_elements=parameter.numel() // max(1, parameter.shape[0])
                if parameter.ndim
                else 1,
                element_bytes=parameter.element_size(),
                trainable=parameter.requires_grad,
                used=index in used,
                lowers=_lowers(parameter),
                group=group_of.get(id(parameter), len(self._groups)),
                whole=parameter in whole,
                whole_lowered=parameter in whole_lowered,
            )
            for index, (name, parameter) in enumerate(self.model.named_parameters())
        )

    def _with_states(
        self, traced: tuple[TracedParameter, ...]
    ) -> tuple[tuple[TracedParameter, ...], StepTrace]:
        """`traced` with their optimizer states, after a second step of the optimizer."""
        parameters = list(self.model.parameters())
        for item, parameter in zip(traced, parameters, strict=True):
            parameter.grad = torch.zeros_like(parameter) if item.used else None
        optimizer = self._spec.build_optimizer(self.model)
        optimizer.step()
        states = [optimizer.state.get(item, {}) for item in parameters]
        gradients = [item.grad for item in parameters if item.grad is not None]
        live = LiveBytes([*parameters, *gradients, *live_tensors(states)])
        with live:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        sizes = [item.bytes for item in traced if item.used]
        step = StepTrace(
            name=type(optimizer).__name__,
            temporary_bytes=max((sum(item) for item in live.sample(1).live), default=0),
            largest_bytes=max(sizes, default=0),
        )
        with_states = []
        for item, parameter, state in zip(traced, parameters, states, strict=True):
            alike, other = 0, 0
            for leaf in live_tensors(state):
                if leaf.shape == parameter.shape and leaf.ndim:
                    alike += leaf.element_size()
                else:
                    other += leaf.numel() * leaf.element_size()
            with_states.append(replace(item, state_element_bytes=alike, state_extra_bytes=other))
        return tuple(with_states), step


class _Callable(nn.Module):
    def __init__(self, function: Callable[[Batch], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, batch: Batch) -> Tensor:
        return self._function(batch)


def _convert(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer, which `nn.Module.to` refuses for fake tensors."""
    converted: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                if id(tensor) not in converted:
                    data = convert(tensor.detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    converted[id(tensor)] = (
                        nn.Parameter(data, tensor.requires_grad) if is_parameter else data
                    )
                tensors[name] = converted[id(tensor)]  # type: ignore[assignment]


@contextmanager
def _restored_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    before = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        yield
    finally:
        for module, forward in before:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _lowers(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.dtype != _LOWERED


def _bytes(tensors: Iterable[Tensor]) -> int:
    unique = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in unique.values())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
