"""Gradient clipping over shards and whole tensors, and which optimizers can work on shards."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from runtime.errors import UnsupportedModelError
from runtime.model_spec import ModelSpec
from runtime.precision import local_tensor

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.ASGD,
    }
)
"""torch's optimizers that treat each element by itself: a shard steps as the whole would."""

FUSED_ON_SHARDS: frozenset[type[Optimizer]] = frozenset({torch.optim.Adam, torch.optim.AdamW})
"""Those whose fused and foreach forms are known to take shards (fused Adagrad does not)."""

_REHEARSAL_ROWS = 131
"""A prime: shards of the rehearsal are uneven on any number of ranks up to it."""
_REHEARSAL_COLUMNS = 130
_REHEARSAL_STEPS = 2


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their global 2-norm is at most `max_norm`; returns the norm.

    Gradients of DTensors are shards, so their part of the norm is summed over the ranks; those of
    plain tensors are alike on every rank and count once. Collective where a gradient is a shard.
    The norm is 0-dim, and the one before clipping.
    """
    gradients = [item.grad for item in parameters if item.grad is not None]
    shards = [item.to_local() for item in gradients if isinstance(item, DTensor)]
    whole = [item for item in gradients if not isinstance(item, DTensor)]
    if shards:
        square = torch.nn.utils.get_total_norm(shards).float().square()
        dist.all_reduce(square)
        norm = square
        if whole:
            norm = norm + torch.nn.utils.get_total_norm(whole).float().square()
        norm = norm.sqrt()
    else:
        norm = torch.nn.utils.get_total_norm(whole)
    scale = max_norm / (norm + 1e-6)  # the epsilon of torch.nn.utils.clip_grad_norm_
    if norm.device.type == "cpu":
        if scale < 1:
            _multiply([*shards, *whole], scale)
    else:  # reading the scale would make the host wait
        _multiply([*shards, *whole], scale.clamp(max=1.0))
    return norm


def _multiply(tensors: list[Tensor], scale: Tensor) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        torch._foreach_mul_(group, scale)


def separate_shards(optimizer: Optimizer) -> None:
    """Split each parameter group that holds both shards and whole tensors in two.

    The operations that step a list of parameters at once refuse a mixed list.
    """
    for group in list(optimizer.param_groups):
        parameters = group["params"]
        whole = [item for item in parameters if not isinstance(item, DTensor)]
        if whole and len(whole) < len(parameters):
            group["params"] = [item for item in parameters if isinstance(item, DTensor)]
            optimizer.add_param_group({**group, "params": whole})


def check_optimizer(spec: ModelSpec, model: nn.Module, *, sharded: bool) -> None:
    """Refuse an optimizer that cannot train this way, before any training.

    An optimizer that is not known to be element-wise takes a few steps on small stand-ins for the
    parameters, once whole and once as shards, and must end at the same values. Collective where
    `sharded`.

    Raises:
        UnsupportedModelError: `step()` wants a closure, or (where `sharded`) steps on shards
            raise or end elsewhere than steps on whole tensors.
    """
    if spec.default_optimizer:
        return
    whole_model = _stand_in(model)
    optimizer = spec.build_optimizer(whole_model)
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedModelError(
            f"optimizer {name} must step without a closure, but its step(closure) requires one: "
            "use an optimizer that takes the gradients as they are"
        )
    if not sharded or _steps_on_shards(optimizer):
        return
    shard_model = _stand_in(model)
    _shard_stand_in(shard_model)
    problem = ""
    try:
        _rehearse(whole_model, optimizer)
        shard_optimizer = spec.build_optimizer(shard_model)
        separate_shards(shard_optimizer)
        _rehearse(shard_model, shard_optimizer)
        problem = _difference(whole_model, shard_model)
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [""]
        problem = f"it raised {type(error).__name__}: {lines[0][:200]}"
    if agreed := _first_problem(problem):
        raise UnsupportedModelError(
            f"optimizer {name} cannot step on shards of its parameters ({agreed}): "
            "use zero_stage 0, or an element-wise optimizer such as AdamW"
        )


def _steps_on_shards(optimizer: Optimizer) -> bool:
    cls = type(optimizer)
    several = any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)
    return cls in FUSED_ON_SHARDS or (cls in ELEMENTWISE and not several)


def _stand_in(model: nn.Module) -> nn.Module:
    """A copy of `model` with the same names and modules, and small parameters."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        limits = (_REHEARSAL_ROWS, _REHEARSAL_COLUMNS, *[3] * parameter.ndim)
        shape = [min(size, limit) for size, limit in zip(parameter.shape, limits, strict=False)]
        if parameter.is_floating_point():
            value = torch.randn(shape, generator=generator).to(parameter.dtype)
        else:
            value = torch.zeros(shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(0, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def _shard_stand_in(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.ndim == 0:
                continue
            if id(parameter) not in sharded:
                shards = distribute_tensor(
                    parameter.detach().clone(), mesh, [Shard(0)], src_data_rank=None
                )
                sharded[id(parameter)] = nn.Parameter(shards, parameter.requires_grad)
            module._parameters[name] = sharded[id(parameter)]


def _rehearse(model: nn.Module, optimizer: Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_REHEARSAL_STEPS):
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.grad = gradient
        optimizer.step()


def _difference(whole: nn.Module, sharded: nn.Module) -> str:
    """Names a parameter whose shard on this rank differs from the whole one's; empty if none."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for (name, expected), parameter in zip(
        whole.named_parameters(), sharded.parameters(), strict=True
    ):
        value = expected.detach()
        if isinstance(parameter, DTensor):
            rows = -(-value.shape[0] // ranks)
            value = value[rank * rows : (rank + 1) * rows]
        if not torch.allclose(local_tensor(parameter.detach()), value, rtol=1e-3, atol=1e-5):
            return f"{name} ends elsewhere than when it is whole"
    return ""


def _first_problem(problem: str) -> str:
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((item for item in problems if item), "")
