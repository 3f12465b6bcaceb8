"""Activation checkpointing of one block: recompute its activations in backward.

`full` keeps only the block's inputs; `selective` also keeps the outputs of matrix products,
attention and convolutions, which cost most to recompute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from runtime.config import ActivationCheckpointing
from runtime.precision import batch_norms

_aten = torch.ops.aten

SAVED_OPERATIONS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_attention_math.default,
]
"""What `selective` keeps. LSTM and other kernels that hide their products are recomputed."""


def checkpoint_block(
    block: nn.Module, mode: ActivationCheckpointing, *, compiled: bool = False
) -> None:
    """Let `block` recompute its activations in backward; nothing where mode is none.

    Random numbers repeat in the recomputation; running statistics of batch norms inside the block
    move once a step, as without checkpointing.
    """
    if mode == "none":
        return
    forward = block.forward
    # The compiler recomputes values alone, never the update of a buffer; it takes no other context.
    norms = [] if compiled else batch_norms(block)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if mode == "selective":
            first, again = create_selective_checkpoint_contexts(SAVED_OPERATIONS)  # type: ignore[no-untyped-call]
        return first, (_both(_frozen_statistics(norms), again) if norms else again)

    # Without a context function, the call is one that torch.compile traces through.
    options: dict[str, Any] = {} if mode == "full" and not norms else {"context_fn": contexts}
    recompute: Callable[..., Any] = functools.partial(
        checkpoint, forward, use_reentrant=False, **options
    )

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recompute(*args, **kwargs)

    block.forward = checkpointed


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)
        yield


@contextmanager
def _frozen_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Running statistics stay as they are: momentum 0, and the counter of batches put back."""
    counters = [norm.num_batches_tracked for norm in norms]
    momenta = [norm.momentum for norm in norms]
    before = [None if counter is None else counter.clone() for counter in counters]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, counter, value in zip(norms, momenta, counters, before, strict=True):
            norm.momentum = momentum
            if counter is not None and value is not None:
                counter.copy_(value)
