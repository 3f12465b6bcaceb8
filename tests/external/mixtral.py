"""Mixtral of transformers, small and untrained: a mixture of experts, 2 of 4 for each token."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    max_position_embeddings=64,
)  # fmt: skip
global_batch_size = 16


def build_model():
    return MixtralForCausalLM(config)


def make_batch(micro_batch_size):
    tokens = torch.randint(config.vocab_size, (micro_batch_size, 48))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}
