"""A language model of stacked LSTMs, whose kernels hide their workspaces; plain SGD."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

vocabulary, width, length = 1000, 256, 64


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        return x + self.lstm(self.norm(x))[0]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_model():
    return LanguageModel()


def make_batch(micro_batch_size):
    tokens = torch.randint(vocabulary, (micro_batch_size, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def compute_loss(model, batch):
    tokens, next_tokens = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), next_tokens.flatten())


def build_optimizer(params):
    return SGD(params, lr=0.1, momentum=0.9)
