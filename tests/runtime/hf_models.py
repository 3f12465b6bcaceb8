"""Small models of transformers, built from configurations (nothing is downloaded)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runtime.model_spec import ModelSpec
from tests.runtime import engine_runs
from tests.runtime.models import SPECS, make_spec

_SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def labelled_tokens(size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 100, (size, 12))
    return {"input_ids": ids, "labels": ids.clone()}


def mixtral() -> nn.Module:
    import transformers

    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_SMALL, num_local_experts=4)
    )


def t5() -> nn.Module:
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=100,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def hf_spec(name: str) -> ModelSpec:
    return make_spec({"mixtral": mixtral, "t5": t5}[name], labelled_tokens)


def train(name: str, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """`engine_runs.train` of one of these models."""
    SPECS[name] = lambda: hf_spec(name)
    try:
        return engine_runs.train(name, config, steps)
    finally:
        del SPECS[name]


def plain_loop(name: str, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """`engine_runs.plain_loop` of one of these models."""
    SPECS[name] = lambda: hf_spec(name)
    try:
        return engine_runs.plain_loop(name, engine_runs.TrainConfig(**config), steps)
    finally:
        del SPECS[name]
