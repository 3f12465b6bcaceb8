"""Notes the moments of a pass at which the engine acts: around groups, and at gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autotune.live_bytes import LiveBytes, live_tensors


class _Inputs(torch.autograd.Function):
    """Tells when the gradients of a group's inputs are complete, as FSDP2's post-backward hook."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.done()
        return (None, *gradients)


def watch_group(group: nn.Module, index: int, live: LiveBytes) -> list[Any]:
    """Note the moments at which FSDP2 gathers, lets go and reduces `group`."""
    entered: list[bool] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        live.moment("forward", index)
        inputs = [leaf for leaf in live_tensors((args, kwargs)) if leaf.requires_grad]
        if not inputs or not torch.is_grad_enabled():
            return None
        done = functools.partial(live.moment, "backwarded", index)
        marked = iter(_Inputs.apply(done, *inputs))  # type: ignore[no-untyped-call]

        def replaced(leaf: Any) -> Any:
            return next(marked) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf

        return tree_map(replaced, (args, kwargs))

    def after(_: nn.Module, __: Any, output: Any) -> None:
        live.moment("forwarded", index)
        entered.clear()

        def begin(gradient: Tensor) -> None:
            if not entered:
                entered.append(True)
                live.moment("backward", index)

        for leaf in live_tensors(output):
            if leaf.requires_grad:
                leaf.register_hook(begin)  # type: ignore[no-untyped-call]

    return [
        group.register_forward_pre_hook(before, with_kwargs=True),
        group.register_forward_hook(after),
    ]


def on_gradient(index: int, live: LiveBytes) -> Callable[[Tensor], None]:
    """The hook that notes the complete gradient of parameter `index`."""

    def complete(parameter: Tensor) -> None:
        assert parameter.grad is not None
        live.gradient(index, parameter.grad)

    return complete
