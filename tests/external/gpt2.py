"""GPT-2 of transformers, small and untrained."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4)
global_batch_size = 16


def build_model():
    return GPT2LMHeadModel(config)


def make_batch(micro_batch_size):
    tokens = torch.randint(config.vocab_size, (micro_batch_size, config.n_positions))
    return {"input_ids": tokens, "labels": tokens}
