"""T5 of transformers (an encoder-decoder with one embedding for all), untrained."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

config = T5Config(
    vocab_size=1500, d_model=192, d_kv=32, d_ff=512, num_layers=3, num_heads=6,
    decoder_start_token_id=0,
)  # fmt: skip


def build_model():
    return T5ForConditionalGeneration(config)


def make_batch(micro_batch_size):
    source = torch.randint(1, config.vocab_size, (micro_batch_size, 64))
    return {"input_ids": source, "labels": source.flip(1)}
