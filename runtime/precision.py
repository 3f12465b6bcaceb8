"""Arithmetic of forward and backward, and the dtype in which gradients travel.

Master parameters keep the dtype that the user built them in (fp32, as a rule). Unsharded
parameters (stage 0, or one rank) are lowered by autocast; sharded ones are gathered in the compute
dtype (`MixedPrecisionPolicy`), which halves the bytes of every all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from runtime.config import Precision, TrainConfig

_COMPUTE_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def lowered_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype that forward and backward are lowered to; None where nothing is lowered."""
    return None if precision == "fp32" else _COMPUTE_DTYPES[precision]


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """Autocast to the dtype of `precision`; one that does nothing where precision is fp32."""
    dtype = lowered_dtype(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def shard_policy(config: TrainConfig) -> MixedPrecisionPolicy:
    """What `fully_shard` gathers parameters in and reduces gradients in.

    Inputs are cast by `lower_inputs` instead, which the root (it sees the user's batch, targets
    included) goes without.
    """
    dtype = lowered_dtype(config.precision)
    if dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    reduce_dtype = torch.float32 if config.reduce_dtype == "fp32" else dtype
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )


def lower_inputs(
    forward: Callable[..., Any], dtype: torch.dtype, device: torch.device
) -> Callable[..., Any]:
    """`forward` with its floating-point inputs cast to `dtype`, outside autocast.

    A block whose parameters are already `dtype` needs no autocast, and runs norms and element-wise
    operations in `dtype` too. Inputs without gradient are clamped to the range of `dtype` first: a
    mask filled with the lowest fp32 number would overflow to -inf, and a row of -inf is nan after
    softmax.
    """
    lowest, highest = torch.finfo(dtype).min, torch.finfo(dtype).max

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == dtype:
            return leaf
        if not leaf.requires_grad:
            leaf = leaf.clamp(lowest, highest)
        return leaf.to(dtype)

    def lowered(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, enabled=False):
            return forward(*tree_map(cast, args), **tree_map(cast, kwargs))

    return lowered


def compress_all_reduce(module: DistributedDataParallel, dtype: torch.dtype) -> None:
    """Let `module` all-reduce its gradient buckets in `dtype`, on any backend.

    torch's own `bf16_compress_hook` refuses gloo, which reduces bf16 well.
    """
    # A lambda, because torch inspects a hook's annotations, which are strings in this file.
    module.register_comm_hook(None, lambda _, bucket: _all_reduce_in(dtype, bucket))


def _all_reduce_in(dtype: torch.dtype, bucket: GradBucket) -> Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    compressed = buffer.to(dtype).div_(dist.get_world_size())  # first, or fp16 sums overflow
    work = dist.all_reduce(compressed, async_op=True)
    assert work is not None

    def restore(future: Future[Any]) -> Tensor:
        return buffer.copy_(future.value()[0])

    reduced: Future[Tensor] = work.get_future().then(restore)
    return reduced


class LossScaler(torch.amp.GradScaler):
    """torch's gradient scaler, for a list of shards (DTensors) and whole tensors.

    A gradient that is not finite on one rank skips the step on every rank.
    """

    def __init__(self, device: torch.device, *, sharded: bool) -> None:
        super().__init__(device.type)
        self._sharded = sharded
        self._found_inf: Tensor | None = None

    def unscale_and_check(self, optimizer: Optimizer) -> bool:
        """Divide the gradients by the scale; True where one, on any rank, is not finite."""
        self.unscale_(optimizer)
        assert self._found_inf is not None
        return bool(self._found_inf.item())

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = local_tensor(parameter.grad)
                    by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        if self._sharded:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        self._found_inf = found_inf
        return {found_inf.device: found_inf}


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def batch_norms(model: nn.Module) -> list[_NormBase]:
    """The batch-norm modules: their statistics stay fp32, so their parameters must too."""
    return [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)
    ]
