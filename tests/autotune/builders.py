"""Hardware and profiles made up for the tests of the tuner's arithmetic."""

from __future__ import annotations

from typing import Any

from autotune.records import Hardware, ModelProfile

MIB = 2**20


def make_hardware(**changes: Any) -> Hardware:
    """A CPU host with every arithmetic and a compiler."""
    values: dict[str, Any] = {
        "device": "cpu",
        "device_name": "test CPU",
        "device_count": 0,
        "cores": 2,
        "host_memory_bytes": 16 * 2**30,
        "device_memory_bytes": 0,
        "fp16_arithmetic": True,
        "bf16_arithmetic": True,
        "compiler": "/usr/bin/g++",
        "python": "3.11",
        "torch": "2.13.0",
        "platform": "Linux",
    }
    return Hardware(**{**values, **changes})


def make_profile(**changes: Any) -> ModelProfile:
    """A model of 10 MiB parameters in 8 blocks, trained with AdamW."""
    values: dict[str, Any] = {
        "parameter_count": 10 * MIB // 4,
        "trainable_parameter_count": 10 * MIB // 4,
        "parameter_bytes": 10 * MIB,
        "trainable_bytes": 10 * MIB,
        "buffer_bytes": 0,
        "block_class": "Block",
        "block_count": 8,
        "largest_block_bytes": MIB,
        "root_bytes": 2 * MIB,
        "optimizer": "AdamW",
        "optimizer_state_bytes": 20 * MIB,
        "tokens_per_sample": 128,
        "activation_bytes": {1: 12 * MIB, 2: 22 * MIB},
        "micro_batch_seconds": {1: 0.1, 2: 0.2},
    }
    return ModelProfile(**{**values, **changes})
