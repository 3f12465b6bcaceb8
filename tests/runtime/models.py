"""Small models, one for each thing that breaks sharded training; each is a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from runtime.model_spec import Batch, ModelSpec, _default_loss

WIDTH = 8
VOCABULARY = 17
LENGTH = 6


def make_spec(
    build_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Batch],
    compute_loss: Callable[[nn.Module, Batch], Tensor] = _default_loss,
    build_optimizer: Callable[[Any], Optimizer] | None = None,
    block_classes: tuple[type[nn.Module], ...] | None = None,
) -> ModelSpec:
    def default_optimizer(model: nn.Module) -> Optimizer:
        return AdamW(
            [item for item in model.parameters() if item.requires_grad], lr=1e-2, fused=True
        )

    return ModelSpec(
        path=Path(__file__),
        build_model=build_model,
        make_batch=make_batch,
        compute_loss=compute_loss,
        build_optimizer=build_optimizer or default_optimizer,
        default_optimizer=build_optimizer is None,
        global_batch_size=None,
        block_classes=block_classes,
    )


def tokens(size: int) -> tuple[Tensor, Tensor]:
    """Ids and next ids, both of shape (size, LENGTH)."""
    ids = torch.randint(VOCABULARY, (size, LENGTH + 1))
    return ids[:, :-1], ids[:, 1:]


def images(size: int) -> tuple[Tensor, Tensor]:
    """Images of shape (size, 3, 8, 8), and labels."""
    return torch.randn(size, 3, 8, 8), torch.randint(5, (size,))


def features(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, 3)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Block(nn.Module):
    """Pre-norm attention and MLP over (B, T, WIDTH)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a key bias has no gradient
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Returns its loss as `{"loss": ...}`; tied head; buffers of several dtypes."""

    def __init__(self, depth: int = 3, width: int = WIDTH, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.register_buffer("table", torch.randn(LENGTH, width), persistent=False)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def encode(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.head(self.encode(ids)), targets)}


def _method_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Calls a method and reads a parameter; the model's forward never runs."""
    ids, targets = batch
    return cross_entropy(F.linear(model.encode(ids), model.head.weight), targets)


def _penalised_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Reads a parameter of a block while the block is not running."""
    return model(*batch)["loss"] + 0.1 * model.blocks[1].out.weight.square().mean()


class Expert(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Sends each micro-batch to the one expert that its integer label names; expert 3 is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor, route: Tensor) -> Tensor:
        x = self.inp(x)
        x = x + self.experts[int(route[0])](x)
        return F.mse_loss(self.out(x), y)


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        return x + self.experts[int(route[0])](self.norm(x))


class MixtureOfExperts(Experts):
    """The experts lie inside repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, route: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, route)
        return F.mse_loss(self.out(x), y)


def routed(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Micro-batches take expert 0, 1 or 2 by the first sample, so ranks differ."""
    return (*features(size), torch.randint(3, (size,)))


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(*(ConvBlock(8) for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), y)


class Scaled(nn.Module):
    """A 0-dim parameter in each block and one outside; parameters of one row; an idle layer."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.tiny = nn.Linear(WIDTH, 1)
            self.gain = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gain * torch.tanh(self.linear(x)) * self.tiny(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.idle_gain = nn.Parameter(torch.tensor(2.0))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.out(x) / self.temperature, y)


class Frozen(Gpt):
    """Everything but the last block, the norm and one bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)
        self.blocks[0].out.bias.requires_grad_(True)
        self.norm.requires_grad_(True)


class Plain(nn.Module):
    """No repeated blocks: an LSTM between an embedding and a head; a tensor batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.lstm(self.embed(ids[:, :-1]))[0])
        return cross_entropy(logits, ids[:, 1:]), logits


class SharedPart(nn.Module):
    """Blocks that share one linear layer, and a block that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(4))
        self.blocks[1].down = self.blocks[0].down
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index in (0, 1, 2, 3, 2):
            x = x + self.blocks[index](x)
        return F.mse_loss(self.out(x), y)


class EncoderDecoder(nn.Module):
    """Two lists of blocks of two classes; a dict batch with an entry that is no tensor."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = Block()
            self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            x = self.own(x)
            return x + self.attention(x, memory, memory, need_weights=False)[0]

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(self.Cross() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, reduction: str) -> dict[str, Tensor]:
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        x = self.embed(target[:, :-1])
        for block in self.decoder:
            x = block(x, memory)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), reduction=reduction)
        return {"loss": loss, "logits": logits}


def pairs(size: int) -> dict[str, Any]:
    source, target = (torch.randint(VOCABULARY, (size, LENGTH)) for _ in range(2))
    return {"source": source, "target": target, "reduction": "mean"}


class MixedDtypes(nn.Module):
    """A router in fp64 within blocks in fp32, and a block that builds fp32 tensors itself."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.router = nn.Linear(WIDTH, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                gate = torch.sigmoid(self.router(x.double())).float()
            return x + self.linear(x.float() * gate)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.out(x), y)


SPECS: dict[str, Callable[[], ModelSpec]] = {
    "gpt": lambda: make_spec(Gpt, tokens),
    "method": lambda: make_spec(Gpt, tokens, _method_loss),
    "penalty": lambda: make_spec(Gpt, tokens, _penalised_loss),
    "experts": lambda: make_spec(Experts, routed),
    "moe": lambda: make_spec(MixtureOfExperts, routed),
    "conv": lambda: make_spec(ConvNet, images),
    "scaled": lambda: make_spec(Scaled, features),
    "frozen": lambda: make_spec(Frozen, tokens),
    "plain": lambda: make_spec(Plain, lambda size: torch.randint(VOCABULARY, (size, LENGTH))),
    "shared": lambda: make_spec(SharedPart, features),
    "seq2seq": lambda: make_spec(EncoderDecoder, pairs),
    "mixed": lambda: make_spec(MixedDtypes, features),
}
