"""GPT-2 of transformers (a decoder), untrained."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(
    vocab_size=2048, n_positions=96, n_embd=256, n_layer=6, n_head=8, bos_token_id=0, eos_token_id=0
)


def build_model():
    return GPT2LMHeadModel(config)


def make_batch(micro_batch_size):
    tokens = torch.randint(config.vocab_size, (micro_batch_size, config.n_positions))
    return {"input_ids": tokens, "labels": tokens}
