"""Llama of transformers (a decoder with grouped queries and gated MLPs), untrained."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=2000, hidden_size=256, intermediate_size=688, num_hidden_layers=5,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=96,
)  # fmt: skip


def build_model():
    return LlamaForCausalLM(config)


def make_batch(micro_batch_size):
    tokens = torch.randint(config.vocab_size, (micro_batch_size, 96))
    return {"input_ids": tokens, "labels": tokens}
