"""BERT of transformers (an encoder), untrained, with dropout and a mask of padding."""

import torch
from transformers import BertConfig, BertForMaskedLM

config = BertConfig(
    vocab_size=3000, hidden_size=192, num_hidden_layers=6, num_attention_heads=6,
    intermediate_size=768, max_position_embeddings=128,
)  # fmt: skip


def build_model():
    return BertForMaskedLM(config)


def make_batch(micro_batch_size):
    tokens = torch.randint(config.vocab_size, (micro_batch_size, 96))
    mask = torch.ones_like(tokens)
    mask[:, 80:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
