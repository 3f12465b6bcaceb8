"""Mixtral of transformers (a mixture of experts, 2 of 4 for each token), untrained."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    vocab_size=1500, hidden_size=192, intermediate_size=384, num_hidden_layers=4,
    num_attention_heads=6, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    max_position_embeddings=96,
)  # fmt: skip


def build_model():
    return MixtralForCausalLM(config)


def make_batch(micro_batch_size):
    tokens = torch.randint(config.vocab_size, (micro_batch_size, 64))
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}
