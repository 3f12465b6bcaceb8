"""T5 of transformers, small and untrained: an encoder-decoder with one embedding for all."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

config = T5Config(
    vocab_size=512, d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4,
    decoder_start_token_id=0,
)  # fmt: skip
global_batch_size = 16


def build_model():
    return T5ForConditionalGeneration(config)


def make_batch(micro_batch_size):
    source = torch.randint(1, config.vocab_size, (micro_batch_size, 48))
    return {"input_ids": source, "labels": source.flip(1)}
