"""ViT of transformers (vision), untrained."""

import torch
from transformers import ViTConfig, ViTForImageClassification

config = ViTConfig(
    hidden_size=192, num_hidden_layers=6, num_attention_heads=6, intermediate_size=768,
    image_size=64, patch_size=8, num_labels=100,
)  # fmt: skip


def build_model():
    return ViTForImageClassification(config)


def make_batch(micro_batch_size):
    return {
        "pixel_values": torch.randn(micro_batch_size, 3, config.image_size, config.image_size),
        "labels": torch.randint(config.num_labels, (micro_batch_size,)),
    }
