"""An encoder-decoder that learns to sort: numbers in any order in, the same in rising order out.

One embedding serves the encoder's input, the decoder's input and the output (tied three times).
Letters in shape comments: B samples, T tokens, C channels, H heads, D channels of a head,
V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

layers, heads, width = 3, 4, 192
numbers = 500
start = numbers  # the token that the decoder's input begins with
vocabulary_size = numbers + 1
sequence_length = 32
dropout = 0.0
global_batch_size = 64


class Attention(nn.Module):
    """Mixes values of `context` (B, S, C) into `x` (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, causal: bool = False) -> Tensor:
        query = self.query(x).unflatten(2, (heads, -1)).transpose(1, 2)  # (B, H, T, D)
        key, value = self.key_value(context).unflatten(2, (2, heads, -1)).unbind(2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)  # (B, H, S, D)
        rate = dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.mlp = Attention(), MLP()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.dropout(self.attention(normed, normed))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention, self.cross_attention, self.mlp = Attention(), Attention(), MLP()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.dropout(self.attention(normed, normed, causal=True))
        x = x + self.dropout(self.cross_attention(self.norms[1](x), encoded))
        return x + self.dropout(self.mlp(self.norms[2](x)))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.position = nn.Parameter(0.02 * torch.randn(sequence_length, width))
        self.encoder = nn.ModuleList(EncoderBlock() for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderBlock() for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Source and target (B, T) to the mean loss, and logits (B, T, V) of the target."""
        encoded = self.embedding(source) + self.position  # (B, T, C)
        for block in self.encoder:
            encoded = block(encoded)
        encoded = self.encoder_norm(encoded)
        shifted = F.pad(target[:, :-1], (1, 0), value=start)
        x = self.embedding(shifted) + self.position  # (B, T, C)
        for block in self.decoder:
            x = block(x, encoded)
        logits = self.head(self.decoder_norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return {"loss": loss, "logits": logits}


class Sorting(Dataset[dict[str, Tensor]]):
    """Source (T,) of random numbers and target (T,), the same at every look."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        source = torch.randint(numbers, (sequence_length,), generator=generator)
        return {"source": source, "target": source.sort().values}


def build_dataset(split: Literal["train", "held_out"] = "train") -> Sorting:
    """100,000 sequences to train on, and 10,000 others to test on."""
    return Sorting(0, 100_000) if split == "train" else Sorting(100_000, 10_000)


def build_model() -> nn.Module:
    return Seq2Seq()


def make_batch(micro_batch_size: int) -> dict[str, Tensor]:
    """Source and target, each (B, T); the model is called with both and returns its loss."""
    dataset = build_dataset()
    places = torch.randint(len(dataset), (micro_batch_size,)).tolist()
    return default_collate([dataset[place] for place in places])
