"""How the ranks of one run share the work: one rank alone, DDP (stage 0), or FSDP2 (1 to 3).

Each class wraps the same `LossModule`, and answers the same few questions of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from runtime.config import TrainConfig
from runtime.errors import UnsupportedModelError
from runtime.model_spec import Batch
from runtime.model_state import BufferWatch
from runtime.precision import compress_all_reduce, lower_inputs, lowered_dtype, shard_policy
from runtime.sharding import module_names, replicated_parameters


class LossModule(nn.Module):
    """The model and its loss as one module, whose forward is the loss.

    DDP hides the attributes of the module it wraps, and FSDP2 gathers parameters around `forward`
    alone: with the loss inside, `compute_loss` may call any method of the model and read any
    parameter of the root's group.
    """

    def __init__(self, model: nn.Module, compute_loss: Callable[[nn.Module, Batch], Tensor]):
        super().__init__()
        self.model = model
        self._compute_loss = compute_loss

    def forward(self, batch: Batch) -> Tensor:
        """0-dim loss of one micro-batch."""
        return self._compute_loss(self.model, batch)


class DataParallel(Protocol):
    """What an engine asks of the way that ranks share the work."""

    module: nn.Module
    """Called with a micro-batch, gives the loss; hooks synchronise around it."""
    sharded: bool
    """Whether gradients are shards, so that norms and checks need a reduction over ranks."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one micro-batch; `last` of its optimizer step."""

    def finish_gradients(self) -> None:
        """After the last backward: every gradient becomes the mean over ranks, or None."""

    def forward_only(self, batch: Batch) -> Tensor:
        """Loss without backward; what it gathered is let go."""


class SingleRank:
    """Plain PyTorch."""

    sharded = False

    def __init__(self, module: LossModule) -> None:
        self.module: nn.Module = module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def finish_gradients(self) -> None:
        return

    def forward_only(self, batch: Batch) -> Tensor:
        loss: Tensor = self.module(batch)
        return loss


class Replicated:
    """Stage 0: every rank holds everything; one all-reduce of the gradients a step."""

    sharded = False

    def __init__(self, module: LossModule, config: TrainConfig, device: torch.device) -> None:
        self._ddp = DistributedDataParallel(
            module,
            device_ids=None if device.type == "cpu" else [device],
            forward_sync_buffers=False,  # BufferWatch sends those that changed, and only those
            init_sync=False,  # the engine has broadcast parameters and buffers
            find_unused_parameters=True,  # experts, idle layers: their gradients stay None
            gradient_as_bucket_view=True,
        )
        self.module: nn.Module = self._ddp
        dtype = lowered_dtype(config.precision)
        if dtype is not None and config.reduce_dtype == "compute":
            compress_all_reduce(self._ddp, dtype)
        self._agreement = Agreement(0, BufferWatch(module))
        self._plain = module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = nullcontext() if last else self._ddp.no_sync()
        return context

    def finish_gradients(self) -> None:
        self._agreement.reach()

    def forward_only(self, batch: Batch) -> Tensor:
        loss: Tensor = self._plain(batch)
        return loss


class Sharded:
    """Stages 1 to 3: a group of shards for each of `groups`, and the root's for all the rest.

    | stage | after forward | after backward | reduce-scatter |
    | --- | --- | --- | --- |
    | 1 | stay gathered | let go after the last micro-batch | on the last micro-batch |
    | 2 | stay gathered | let go after the last micro-batch | on every micro-batch |
    | 3 | let go | let go | on every micro-batch |

    `calls` is the order in which one forward calls the groups (indices into `groups`), the same
    on every rank: a group gathers when it is called, so ranks that call different groups would
    mix up each other's parameters.
    """

    sharded = True

    def __init__(
        self,
        module: LossModule,
        groups: Sequence[nn.Module],
        calls: Sequence[int],
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        self.module: nn.Module = module
        self._stage = config.zero_stage
        self._names = module_names(module.model, groups)
        self._calls = tuple(calls)
        self._position = 0
        self._lowered: list[tuple[nn.Module, Callable[..., Any]]] = []
        dtype = lowered_dtype(config.precision)
        self._accumulates = config.gradient_accumulation_steps > 1
        self._whole = replicated_parameters(module.model, groups, lowered=dtype is not None)
        self._usage = _Usage(module, groups, self._whole)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": shard_policy(config),
            "ignored_params": self._whole,
        }
        for index, group in enumerate(groups):
            group.forward = _own_outputs(group.forward)
            if dtype is not None:
                self._lowered.append((group, group.forward))
                group.forward = lower_inputs(group.forward, dtype, device)
            fully_shard(group, reshard_after_forward=config.zero_stage == 3, **options)
            group.register_forward_pre_hook(self._guard(index), prepend=True)
        # Backward starts with the root's parameters: letting them go after forward gains nothing.
        self._root: FSDPModule = fully_shard(module, reshard_after_forward=False, **options)
        module.register_forward_pre_hook(self._start_forward, prepend=True)
        module.register_forward_hook(self._end_forward)
        # Every rank then reduces every parameter, whichever it used; `Agreement` undoes the zeros.
        self._root.set_reduce_scatter_unused_params(True)
        self._usage.watch()
        self._agreement = Agreement(len(self._usage), BufferWatch(module))

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        if self._stage == 1:
            self._root.set_requires_gradient_sync(last)
            if last and self._accumulates:
                _fill_accumulated(self.module)
        if self._stage < 3:
            self._root.set_reshard_after_backward(last)
        return nullcontext()

    def finish_gradients(self) -> None:
        used = self._agreement.reach(self._usage.take())
        self._usage.clear_unused(used)
        self._reduce_whole(used)

    def forward_only(self, batch: Batch) -> Tensor:
        loss: Tensor = self.module(batch)
        self.reshard()
        return loss

    def reshard(self) -> None:
        """Let every gathered parameter go; the next forward gathers the current ones."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def recover(self) -> None:
        """Start afresh after a forward that raised."""
        self._root.reset_iter_state()

    def autocast_blocks(self) -> None:
        """Leave the inputs of blocks as they are, and their operations to autocast."""
        for group, forward in self._lowered:
            group.forward = forward

    def _reduce_whole(self, used: Sequence[bool]) -> None:
        """Average the gradients of parameters that every rank holds whole."""
        parameters = [item for item in self._usage.whole(used) if item.requires_grad]
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for group in by_dtype.values():
            flat = torch.cat([_gradient(item).reshape(-1) for item in group])
            flat.div_(dist.get_world_size())
            dist.all_reduce(flat)
            parts = torch.split(flat, [item.numel() for item in group])
            for parameter, part in zip(group, parts, strict=True):
                parameter.grad = part.reshape(parameter.shape)

    def _start_forward(self, *_: Any) -> None:
        self._position = 0

    def _end_forward(self, *_: Any) -> None:
        if self._position < len(self._calls):
            raise _out_of_order(self._names[self._calls[self._position]], "was skipped")

    def _guard(self, index: int) -> Callable[..., None]:
        def check(*_: Any) -> None:
            position = self._position
            if position >= len(self._calls) or self._calls[position] != index:
                raise _out_of_order(self._names[index], "was called out of turn")
            self._position = position + 1

        return check


def _own_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, returning no views: FSDP2's hook on a view is lost to an in-place operation."""

    def copy_views(leaf: Any) -> Any:
        is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._base is not None
        return leaf.clone() if is_view else leaf

    def owned(*args: Any, **kwargs: Any) -> Any:
        return tree_map(copy_views, forward(*args, **kwargs))

    return owned


def _fill_accumulated(root: nn.Module) -> None:
    """Give parameters unused so far a zero gradient in the reduce dtype.

    FSDP2 accumulates unreduced gradients in the reduce dtype, but adds those first seen in the
    last micro-batch in the compute dtype, and then refuses to reduce the two together.
    """
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for item in group.fsdp_params:
                missing = item.reduce_dtype is not None and item.unsharded_accumulated_grad is None
                if (
                    missing
                    and item.sharded_param.requires_grad
                    and hasattr(item, "_unsharded_param")
                ):
                    item.unsharded_accumulated_grad = torch.zeros_like(
                        item.unsharded_param, dtype=item.reduce_dtype
                    )


def _out_of_order(name: str, event: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"zero_stage >= 1 needs every forward to call the blocks in one order on every rank, but "
        f"{name!r} {event}: use zero_stage 0, or name other block_classes in the model file"
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class _Usage:
    """Which trainable parameters got a gradient on this rank since the last `take`.

    FSDP2 swaps the parameters of a module for gathered ones around its forward, so a parameter is
    named by where it is registered, and watched once it has been gathered for the first time.
    """

    def __init__(
        self, root: nn.Module, groups: Sequence[nn.Module], whole: set[nn.Parameter]
    ) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        self._whole: list[int] = []
        index_of: dict[int, int] = {}
        by_group: list[tuple[nn.Module, list[int]]] = []
        for group in (*groups, root):
            indices = []
            for module in group.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if id(parameter) in index_of or not parameter.requires_grad:
                        continue
                    index = index_of[id(parameter)] = len(self._places)
                    self._places.append((module, name))
                    if parameter in whole:
                        self._whole.append(index)
                    indices.append(index)
            by_group.append((group, indices))
        self._groups = by_group
        self._used = bytearray(len(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def watch(self) -> None:
        """Start watching; after `fully_shard`, so that its hooks gather before ours look."""
        for group, indices in self._groups:
            self._watch_after_gather(group, indices)

    def take(self) -> bytearray:
        """The flags, one byte a parameter; they start again from zero."""
        taken, self._used = self._used, bytearray(len(self._places))
        return taken

    def clear_unused(self, used: Sequence[bool]) -> None:
        """Set the gradient of parameters that no rank used to None, as on a single process."""
        for index, (module, name) in enumerate(self._places):
            if not used[index]:
                getattr(module, name).grad = None

    def whole(self, used: Sequence[bool]) -> list[nn.Parameter]:
        """The used parameters that every rank holds whole."""
        places = [self._places[index] for index in self._whole if used[index]]
        return [getattr(module, name) for module, name in places]

    def _watch_after_gather(self, group: nn.Module, indices: list[int]) -> None:
        def once(*_: Any) -> None:
            if torch.is_grad_enabled():
                handle.remove()
                for index in indices:
                    module, name = self._places[index]
                    getattr(module, name).register_post_accumulate_grad_hook(self._mark(index))

        handle = group.register_forward_pre_hook(once)

    def _mark(self, index: int) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            self._used[index] = 1

        return mark


class Agreement:
    """One small reduction a step, over what each rank saw: used parameters, changed buffers."""

    def __init__(self, parameters: int, buffers: BufferWatch) -> None:
        self._parameters = parameters
        self._buffers = buffers
        # On the host, so that no rank waits for its device.
        on_host = any(name in str(dist.get_backend_config()) for name in ("gloo", "cpu"))
        self._group = None if on_host else dist.new_group(backend="gloo")

    def reach(self, used: bytearray | None = None) -> list[bool]:
        """Whether any rank used each parameter; buffers that changed anywhere become rank 0's."""
        flags = list(used or ()) + [int(changed) for changed in self._buffers.changed()]
        if not flags:
            return []
        tensor = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        agreed = [bool(flag) for flag in tensor.tolist()]
        if len(self._buffers):
            self._buffers.accept(agreed[self._parameters :])
        return agreed[: self._parameters]
