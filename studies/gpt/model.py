"""A GPT of 10.8M parameters on bytes of English text: the help pages that ship with Python.

The shape (6 blocks, 6 heads, 384 wide) is that of nanoGPT's character-level model, with rotary
positions and without biases. Letters in shape comments: B samples, T tokens, C channels, H heads,
D channels of a head, V vocabulary.
"""

from __future__ import annotations

import functools
from pydoc_data.topics import topics
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset, default_collate

layers, heads, width = 6, 6, 384
vocabulary_size = 256  # every byte is a token
sequence_length = 64
dropout = 0.0
global_batch_size = 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        # (B, T, 3C) -> three of (B, H, T, D)
        query, key, value = self.query_key_value(x).unflatten(2, (3, heads, -1)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotation),
            rotate(key, rotation),
            value,
            dropout_p=dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        # Computed again wherever the model is built, so not worth a place in a checkpoint.
        for name, table in zip(("cos", "sin"), rotation_tables(), strict=True):
            self.register_buffer(name, table, persistent=False)
        self.apply(initialise)
        for block in self.blocks:  # the residual stream adds up 2 * layers outputs
            for projection in (block.attention.output, block.mlp[2]):
                nn.init.normal_(projection.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) to logits (B, T, V) of each next token."""
        rotation = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embedding(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def rotation_tables(base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, each (T, D/2) (RoPE, arXiv:2104.09864)."""
    half = width // heads // 2
    frequencies = base ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(sequence_length), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of channels of `x` (B, H, T, D) by the angle of its position."""
    cos, sin = (table.to(x.dtype) for table in rotation)  # (T, D/2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every window of `sequence_length` bytes, and the same window one byte later."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.tokens) - sequence_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index : index + sequence_length + 1].long()
        return window[:-1], window[1:]


@functools.cache
def build_dataset(split: Literal["train", "held_out"] = "train") -> Windows:
    """The first nine tenths of the text to train on, the last tenth to test on."""
    text = "\n\n".join(topics.values()).encode()
    cut = len(text) * 9 // 10
    return Windows(text[:cut] if split == "train" else text[cut:])


def build_model() -> nn.Module:
    return GPT()


def make_batch(micro_batch_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, each (B, T), from random places in the text."""
    dataset = build_dataset()
    places = torch.randint(len(dataset), (micro_batch_size,)).tolist()
    return default_collate([dataset[place] for place in places])


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, next_tokens = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), next_tokens.flatten())


def build_optimizer(model: nn.Module) -> Optimizer:
    """AdamW that decays the matrices only; gains of norms are left alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
