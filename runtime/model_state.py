"""Parameters and buffers that every rank must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.errors import UnsupportedModelError
from runtime.precision import local_tensor


def broadcast_state(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers, persistent or not, by name.

    Raises:
        UnsupportedModelError: the ranks built different models.
    """
    tensors = dict(named_state(model))
    layout = "\n".join(f"{name} {tuple(item.shape)} {item.dtype}" for name, item in tensors.items())
    mine = hashlib.sha256(layout.encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine)
    if len(set(digests)) > 1:
        raise UnsupportedModelError(
            "build_model() must build the same model on every rank, but the ranks differ in the "
            "names, shapes or dtypes of its parameters and buffers"
        )
    for tensor in tensors.values():
        broadcast_tensor(tensor)


@torch.no_grad()
def broadcast_tensor(tensor: Tensor) -> None:
    """Overwrite `tensor` with rank 0's, whatever its dtype, shape or strides."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return
    dist.broadcast(flat, src=0)
    if flat.data_ptr() != tensor.data_ptr() and dist.get_rank() != 0:
        received = flat.view(tensor.dtype).reshape(tensor.shape)
        if not torch.equal(received, tensor):  # an expanded tensor cannot be written in place
            tensor.data = received


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, by its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def unique_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`; of a DTensor, this rank's shard."""
    storages = {}
    for tensor in tensors:
        storage = local_tensor(tensor.detach()).untyped_storage()
        storages[(storage.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


class BufferWatch:
    """Knows which buffers changed since the last look, such as batch-norm statistics.

    Policy: after every optimizer step, ranks take rank 0's value of each buffer that changed on
    any of them, as DistributedDataParallel does; constant buffers (masks, rotary tables) cost
    nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners = [
            (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._seen = self._marks()

    def __len__(self) -> int:
        return len(self._owners)

    def changed(self) -> list[bool]:
        """For each buffer, whether one of its module's changed on this rank since `accept`.

        The module's, because batch norm moves its statistics without a new version of them; the
        counter beside them has one.
        """
        modules = {
            id(module)
            for (module, _), (buffer, version), (old, old_version) in zip(
                self._owners, self._marks(), self._seen, strict=True
            )
            if buffer is not old or version != old_version
        }
        return [id(module) in modules for module, _ in self._owners]

    def accept(self, changed_anywhere: list[bool]) -> None:
        """Broadcast the buffers marked true, and start to watch afresh."""
        for (module, name), changed in zip(self._owners, changed_anywhere, strict=True):
            buffer = module._buffers[name]
            if changed and buffer is not None:
                broadcast_tensor(buffer)
        self._seen = self._marks()

    def _marks(self) -> list[tuple[Tensor | None, int]]:
        buffers = [module._buffers[name] for module, name in self._owners]
        return [(buffer, 0 if buffer is None else buffer._version) for buffer in buffers]
