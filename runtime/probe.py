"""One small forward of the unsharded model: which blocks can gather by themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runtime.model_spec import Batch

_HARMLESS = {"size", "dim", "numel", "stride", "is_floating_point", "element_size", "data_ptr"}
_GETTERS_OF_DATA = {"T", "mT", "H", "mH", "data", "real", "imag"}


@dataclass(frozen=True)
class BlockCalls:
    """What one forward did with each block (an index into the probed list)."""

    order: tuple[int, ...]
    leaky: frozenset[int]
    """Blocks with a parameter that was read while the block itself was not running."""


def probe_blocks(module: nn.Module, blocks: Sequence[nn.Module], batch: Batch) -> BlockCalls:
    """Run `module` on `batch` without gradients, and put buffers and random generators back."""
    order: list[int] = []
    running: list[int] = []

    def enter(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            order.append(index)
            running.append(index)

        return hook

    def leave(*_: Any) -> None:
        running.pop()

    handles = [block.register_forward_pre_hook(enter(i)) for i, block in enumerate(blocks)]
    handles += [block.register_forward_hook(leave) for block in blocks]
    home = {id(item): i for i, block in enumerate(blocks) for item in block.parameters()}
    reads = _Reads(home, running)
    try:
        with untouched(module), torch.no_grad(), reads:
            module(batch)
    finally:
        for handle in handles:
            handle.remove()
    return BlockCalls(tuple(order), frozenset(reads.leaky))


def agreed_groups(
    calls: BlockCalls, blocks: Sequence[nn.Module]
) -> tuple[list[nn.Module], list[int]]:
    """The blocks that every rank calls alike, and the order of their calls. Collective.

    The others stay in the root's group, which is always gathered: blocks whose parameters are
    read from outside, and all blocks of a class of which a rank called one more or less often
    than another rank did, or not at all (experts, chosen by the data).
    """
    everyone: list[BlockCalls | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, calls)
    ranks = [item for item in everyone if item is not None]
    leaky = frozenset().union(*(item.leaky for item in ranks))
    counts = [{item.order.count(index) for item in ranks} for index in range(len(blocks))]
    chosen = {type(blocks[i]) for i, seen in enumerate(counts) if len(seen) > 1 or 0 in seen}
    kept = [
        index
        for index, block in enumerate(blocks)
        if index not in leaky and type(block) not in chosen
    ]
    orders = {tuple(index for index in item.order if index in kept) for item in ranks}
    if len(orders) != 1:
        return [], []
    position = {index: place for place, index in enumerate(kept)}
    return [blocks[index] for index in kept], [position[index] for index in orders.pop()]


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Buffers and the generators of torch and Python are afterwards as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    state = random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class _Reads(TorchFunctionMode):
    """Notes the blocks whose parameters are read while they are not running."""

    def __init__(self, home: dict[int, int], running: list[int]) -> None:
        super().__init__()
        self._home = home
        self._running = running
        self.leaky: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_data(func):
            for value in (*args, *kwargs.values()):
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    index = self._home.get(id(item)) if isinstance(item, Tensor) else None
                    if index is not None and index not in self._running:
                        self.leaky.add(index)
        return func(*args, **kwargs)


def _reads_data(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _GETTERS_OF_DATA
    return name not in _HARMLESS
